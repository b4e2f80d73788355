#include "ops/layers/norm.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>

#include "tests/support/ops/elements.hpp"
#include "tests/support/ops/op_case.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::OpCase;

namespace {

constexpr double eps = 1e-3;  // large enough to matter

OpCase layer_norm_case(std::int64_t rows, std::int64_t width, double offset = 0) {
  return {.inputs  = {{rows, width}},
          .weights = {{"weight", {width}}, {"bias", {width}}},
          .build   = [offset](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
            sg::Tensor x = in[0];
            if (offset != 0) {
              x = tape.tensor("moved", in[0].shape);
              tape.add({.op = "move", .reads = in[0], .writes = x}, [offset](const sg::Context& context, auto zero) {
                using T       = decltype(zero);
                const auto to = context.write<T>();
                for (std::size_t i = 0; i < to.size(); ++i) to[i] = context.read<T>()[i] + static_cast<T>(offset);
              });
            }
            return sg::layer_norm(tape,
                                    {.x = x, .weight = tape.weight("weight"), .bias = tape.weight("bias"), .eps = eps});
          }};
}

OpCase rms_norm_case(std::int64_t rows, std::int64_t width) {
  return {.inputs  = {{rows, width}},
          .weights = {{"weight", {width}}},
          .build   = [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
            return sg::rms_norm(tape, {.x = in[0], .weight = tape.weight("weight"), .eps = eps});
          }};
}

// Row by row, by the definition.
std::vector<double> reference(const OpCase& test, bool centered, double offset = 0) {
  const auto given            = sg::testing::values(test);
  const std::size_t width     = given.weights[0].size();
  const std::vector<double>&x = given.inputs[0], &weight = given.weights[0];
  std::vector<double> y(x.size());
  for (std::size_t row = 0; row < x.size() / width; ++row) {
    double mean = 0, squares = 0;
    for (std::size_t i = 0; i < width; ++i) mean += (x[row * width + i] + offset) / static_cast<double>(width);
    if (!centered) mean = 0;
    for (std::size_t i = 0; i < width; ++i) {
      squares += std::pow(x[row * width + i] + offset - mean, 2) / static_cast<double>(width);
    }
    for (std::size_t i = 0; i < width; ++i) {
      y[row * width + i] = (x[row * width + i] + offset - mean) / std::sqrt(squares + eps) * weight[i] +
                           (centered ? given.weights[1][i] : 0);
    }
  }
  return y;
}

}  // namespace

TEST_CASE("norms agree with their definitions", "[ops][norm]") {
  const auto [rows, width] = GENERATE(std::pair{1, 1}, std::pair{3, 5}, std::pair{4, 37}, std::pair{70, 700});
  CAPTURE(rows, width);
  const OpCase layer = layer_norm_case(rows, width), rms = rms_norm_case(rows, width);
  CHECK(sg::testing::distance(sg::testing::evaluate(layer), reference(layer, true)) < 1e-13);
  CHECK(sg::testing::distance(sg::testing::evaluate(rms), reference(rms, false)) < 1e-13);
  CHECK(sg::testing::distance(sg::testing::evaluate(layer, sg::DType::f32), reference(layer, true)) < 5e-7);
  CHECK(sg::testing::distance(sg::testing::evaluate(rms, sg::DType::f32), reference(rms, false)) < 5e-7);
}

TEST_CASE("a layer norm in f32 is accurate for a mean far from zero", "[ops][norm]") {
  constexpr double offset = 64;  // x keeps 2^-18 of it: a difference of squares would lose the variance
  const OpCase test       = layer_norm_case(3, 64, offset);
  CHECK(sg::testing::distance(sg::testing::evaluate(test, sg::DType::f32), reference(test, true, offset)) < 1e-5);
}

TEST_CASE("gradients of norms agree with finite differences", "[ops][norm][gradient]") {
  const auto [rows, width] = GENERATE(std::pair{1, 3}, std::pair{5, 19}, std::pair{3, 32});
  CAPTURE(rows, width);
  check_gradients(layer_norm_case(rows, width));
  check_gradients(rms_norm_case(rows, width));
}

TEST_CASE("weight gradients of norms are sums over all rows, for any number of columns", "[ops][norm][gradient]") {
  const OpCase test = layer_norm_case(50, 500);
  const auto found  = sg::testing::gradients(test);
  const auto given  = sg::testing::values(test);
  const auto dy     = sg::testing::output_gradient(test);
  const auto y      = sg::testing::evaluate(test);
  std::vector<double> of_weight(500), of_bias(500);
  for (std::size_t i = 0; i < dy.size(); ++i) {
    of_weight[i % 500] += dy[i] * (y[i] - given.weights[1][i % 500]) / given.weights[0][i % 500];
    of_bias[i % 500] += dy[i];
  }
  CHECK(sg::testing::distance(found.weights[0], of_weight) < 1e-11);
  CHECK(sg::testing::distance(found.weights[1], of_bias) < 1e-13);
}

TEST_CASE("a layer norm's gradient is orthogonal to its rows, also over several tiles", "[ops][norm][gradient]") {
  // Shifting or scaling a row does not change its norm (eps aside), so the gradient has no such components.
  OpCase test                 = layer_norm_case(90, 400);
  const std::vector<double> x = sg::testing::values(test).inputs[0], dx = sg::testing::gradients(test).inputs[0];
  double worst = 0;
  for (std::size_t row = 0; row < 90; ++row) {
    double sum = 0, size = 0;
    for (std::size_t i = row * 400; i < (row + 1) * 400; ++i) {
      sum += dx[i];
      size += std::abs(dx[i]);
    }
    worst = std::max(worst, std::abs(sum) / size);
  }
  CHECK(worst < 1e-12);
}

TEST_CASE("norms refuse weights of other widths", "[ops][norm][refuses]") {
  OpCase layer     = layer_norm_case(2, 4);
  layer.weights[1] = {"bias", {5}};
  CHECK_THROWS_MATCHES(
      sg::testing::evaluate(layer), sg::Error,
      MessageMatches(ContainsSubstring("layer_norm: bias is 5, but x is 2x4 (4, the size of a row of x)")));
  OpCase rms     = rms_norm_case(2, 4);
  rms.weights[0] = {"weight", {4, 1}};
  CHECK_THROWS_MATCHES(sg::testing::evaluate(rms), sg::Error,
                       MessageMatches(ContainsSubstring("rms_norm: weight is 4x1, but x is 2x4")));
}

TEST_CASE("norms with f32 weights use them unrounded, and round once", "[ops][norm]") {
  const auto type     = GENERATE(sg::DType::bf16, sg::DType::f16);
  const bool centered = GENERATE(false, true);
  CAPTURE(type, centered);
  OpCase test       = centered ? layer_norm_case(70, 300) : rms_norm_case(70, 300);
  test.exact_in     = type;
  test.wide_weights = true;
  check_halves(test);
  std::vector<double> expected = sg::testing::evaluate(test, sg::DType::f32);
  for (double& each : expected) {
    std::byte bytes[2];
    sg::testing::encode(type, each, bytes);
    each = sg::testing::decode(type, bytes);
  }
  CHECK((sg::testing::evaluate(test, type) == expected));
  test.wide_weights = false;  // other weights
  CHECK((sg::testing::evaluate(test, type) != expected));
}

TEST_CASE("norms in bf16 and f16 are those in f32, rounded", "[ops][norm]") {
  const auto [rows, width] = GENERATE(std::pair{5, 19}, std::pair{70, 700});
  CAPTURE(rows, width);
  check_halves(layer_norm_case(rows, width));
  check_halves(rms_norm_case(rows, width));
}

TEST_CASE("a norm's weight and bias get their gradients from one node", "[ops][norm][gradient]") {
  sg::Graph graph;
  sg::WeightTable weights;
  for (const char* name : {"weight", "bias"}) {
    weights.add({.name     = name,
                 .shape    = {3},
                 .value    = graph.buffer({.name = name, .size_bytes = 12, .type = sg::DType::f32}),
                 .gradient = graph.buffer({.name = name, .size_bytes = 12, .type = sg::DType::f32})});
  }
  sg::Tape tape({.graph = &graph, .weights = &weights});
  const sg::Tensor y = sg::layer_norm(
      tape, {.x = tape.tensor("x", {2, 3}), .weight = tape.weight("weight"), .bias = tape.weight("bias")});
  tape.set_gradient(y, tape.tensor("dy", {2, 3}));
  tape.emit_gradients();
  CHECK(graph.num_nodes() == 3);  // forward, gradient of x, gradient of both weights
  CHECK(weights.entries()[0].has_gradient);
  CHECK(weights.entries()[1].has_gradient);
}
