// A user-defined op: everything it needs is in this file.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "ops/layers/linear.hpp"
#include "ops/tape/tape.hpp"
#include "tests/support/ops/op_case.hpp"

namespace sg = stepgraph;
using sg::testing::distance;

namespace {

// y = max(x, 0)^2, so dx = 2 max(x, 0) dy. Kernels are written once, for f32 and f64 alike.
sg::Tensor squared_relu(sg::Tape& tape, const sg::Tensor& x) {
  const auto forward = []<class T>(const sg::Context& context, T zero) {
    const auto in  = context.read<T>();
    const auto out = context.write<T>();
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = std::max(in[i], zero) * std::max(in[i], zero);
  };
  const auto backward = []<class T>(const sg::Context& context, sg::Into<T> dx) {
    const auto in = context.read<T>(0), dy = context.read<T>(1);
    for (std::int64_t i = 0; i < dx.size; ++i) dx.put(i, 2 * std::max(in[i], T{0}) * dy[i]);
  };
  const sg::Tensor y = tape.tensor("squared_relu", x.shape);
  tape.add({.op = "squared_relu", .reads = x, .writes = y}, forward);
  tape.on_backward({.outputs = {y}, .input_gradients = [=](sg::Tape& back) {
                      back.add_gradient(x, {.op = "squared_relu_gradient", .reads = {x, back.gradient(y)}}, backward);
                    }});
  return y;
}

// y = x times a weight per column. For f32 only; declares its cost and runs on several threads.
sg::Tensor scale_columns(sg::Tape& tape, const sg::Tensor& x, const sg::Weight& scale) {
  const std::int64_t rows = x.rows(), cols = x.cols();
  const auto times = [rows, cols](const sg::Context& context, sg::Into<float> out) {
    const auto in = context.read<float>(0), by = context.read<float>(1);
    context.parallel_for(rows, [&](std::int64_t i) {
      for (std::int64_t j = 0; j < cols; ++j) out.put(i * cols + j, in[i * cols + j] * by[j]);
    });
  };
  const auto forward = [times](const sg::Context& context, float) {
    const auto out = context.write<float>();
    times(context, {out.data(), nullptr, static_cast<std::int64_t>(out.size())});
  };
  const auto scale_gradient = [rows, cols](const sg::Context& context, sg::Into<float> into) {
    const auto in = context.read<float>(0), dy = context.read<float>(1);
    for (std::int64_t j = 0; j < cols; ++j) {
      float sum = 0;
      for (std::int64_t i = 0; i < rows; ++i) sum += in[i * cols + j] * dy[i * cols + j];
      into.put(j, sum);
    }
  };
  const sg::Tensor y = tape.tensor("scale_columns", x.shape);
  const sg::OpNode node{
      .op     = "scale_columns",
      .reads  = {x, scale},
      .writes = y,
      .cost   = {.flops = static_cast<double>(x.num_elements()), .bytes_moved = 2 * static_cast<double>(x.num_bytes())},
      .parallel = true};
  tape.add(node, forward);
  tape.on_backward({.outputs = {y},
                    .input_gradients =
                        [=](sg::Tape& back) {
                          back.add_gradient(x,
                                            {.op       = "scale_columns_gradient",
                                             .reads    = {back.gradient(y), scale},
                                             .cost     = node.cost,
                                             .parallel = true},
                                            times);
                        },
                    .weight_gradients =
                        [=](sg::Tape& back) {
                          back.add_weight_gradient(
                              scale, {.op = "scale_columns_weight_gradient", .reads = {x, back.gradient(y)}},
                              scale_gradient);
                        }});
  return y;
}

}  // namespace

TEST_CASE("a user-defined op runs and is differentiated like any other, among other ops", "[ops][user_op]") {
  sg::testing::check_gradients({.inputs  = {{5, 4}},
                                .weights = {{"up", {8, 4}}, {"down", {4, 8}}},
                                .build   = [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                                  const sg::Tensor up = sg::linear(tape, {.x = in[0], .weight = tape.weight("up")});
                                  return sg::linear(tape, {.x = squared_relu(tape, up), .weight = tape.weight("down")});
                                }});
}

TEST_CASE("squared_relu squares positive elements", "[ops][user_op]") {
  const sg::testing::OpCase test{.inputs = {{3, 7}}, .build = [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                                   return squared_relu(tape, in[0]);
                                 }};
  std::vector<double> expected = sg::testing::values(test).inputs[0];
  for (double& each : expected) each = each > 0 ? each * each : 0;
  CHECK(sg::testing::evaluate(test) == expected);
}

SCENARIO("an op may have a kernel for f32 only", "[ops][user_op]") {
  GIVEN("one whose kernels take floats") {
    const sg::testing::OpCase test{.inputs  = {{6, 3}},
                                   .weights = {{"scale", {3}}},
                                   .build   = [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                                     return scale_columns(tape, in[0], tape.weight("scale"));
                                   }};
    THEN("it runs on a tape of f32") {
      const auto values = sg::testing::values(test);
      const auto dy     = sg::testing::output_gradient(test, sg::DType::f32);
      std::vector<double> y(18), dx(18), dscale(3);
      for (std::size_t i = 0; i < 18; ++i) {
        y[i]  = values.inputs[0][i] * values.weights[0][i % 3];
        dx[i] = dy[i] * values.weights[0][i % 3];
        dscale[i % 3] += dy[i] * values.inputs[0][i];
      }
      const auto gradients = sg::testing::gradients(test, sg::DType::f32);
      CHECK(distance(sg::testing::evaluate(test, sg::DType::f32), y) < 1e-6);
      CHECK(distance(gradients.inputs[0], dx) < 1e-6);
      CHECK(distance(gradients.weights[0], dscale) < 1e-6);
    }
    THEN("a tape of f64 refuses it by name") {
      CHECK_THROWS_MATCHES(sg::testing::evaluate(test, sg::DType::f64), sg::Error,
                           Catch::Matchers::Message("op 'scale_columns': has no kernel for f64"));
    }
  }
}
