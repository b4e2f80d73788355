#include "ops/layers/activation.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <limits>
#include <numbers>

#include "ops/cpu/elementary.hpp"
#include "tests/support/ops/op_case.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::OpCase;

namespace {

OpCase one_input(sg::TensorShape shape, const std::function<sg::Tensor(sg::Tape&, const sg::Tensor&)>& op,
                 double range = 4) {
  return {.inputs = {std::move(shape)},
          .build  = [op](sg::Tape& tape, const std::vector<sg::Tensor>& in) { return op(tape, in[0]); },
          .range  = range};
}

sg::Tensor gelu_tanh(sg::Tape& tape, const sg::Tensor& x) { return sg::gelu(tape, x); }
sg::Tensor gelu_exact(sg::Tape& tape, const sg::Tensor& x) { return sg::gelu(tape, x, sg::Gelu::exact); }

double reference_silu(double x) { return x / (1 + std::exp(-x)); }
double reference_gelu_tanh(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
}
double reference_gelu_exact(double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); }

void check_values(const OpCase& test, double (*reference)(double)) {
  const std::vector<double> x = sg::testing::values(test).inputs[0];
  std::vector<double> expected;
  for (const double each : x) expected.push_back(reference(each));
  CHECK(sg::testing::distance(sg::testing::evaluate(test), expected) < 1e-14);
  CHECK(sg::testing::distance(sg::testing::evaluate(test, sg::DType::f32), expected) < 2e-7);
}

}  // namespace

TEST_CASE("activations are what their formulas say", "[ops][activation]") {
  const sg::TensorShape shape = GENERATE(sg::TensorShape{3, 7}, sg::TensorShape{300, 101});  // within a tile, and more
  CAPTURE(sg::to_string(shape));
  check_values(one_input(shape, gelu_tanh, 8), reference_gelu_tanh);
  check_values(one_input(shape, gelu_exact, 8), reference_gelu_exact);
  check_values(one_input(shape, sg::silu, 20), reference_silu);
}

TEST_CASE("swiglu multiplies the silu of the first half of a row by the second", "[ops][activation]") {
  const auto [rows, width] = GENERATE(std::pair{1, 1}, std::pair{5, 6}, std::pair{40, 500});
  const OpCase test        = one_input({rows, 2 * width}, sg::swiglu, 5);
  const auto x             = sg::testing::values(test).inputs[0];
  std::vector<double> expected;
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < width; ++i) {
      const auto gate = static_cast<std::size_t>(2 * width * row + i), up = gate + static_cast<std::size_t>(width);
      expected.push_back(reference_silu(x[gate]) * x[up]);
    }
  }
  CHECK(sg::testing::distance(sg::testing::evaluate(test), expected) < 1e-14);
  CHECK(sg::testing::distance(sg::testing::evaluate(test, sg::DType::f32), expected) < 3e-7);
}

TEST_CASE("gradients of activations agree with finite differences", "[ops][activation][gradient]") {
  SECTION("gelu by tanh") { check_gradients(one_input({4, 9}, gelu_tanh)); }
  SECTION("gelu") { check_gradients(one_input({4, 9}, gelu_exact)); }
  SECTION("silu") { check_gradients(one_input({4, 9}, sg::silu)); }
  SECTION("swiglu") { check_gradients(one_input({4, 10}, sg::swiglu)); }
}

TEST_CASE("gradients of activations over several tiles are correct", "[ops][activation][gradient]") {
  const auto [op, shape] = GENERATE(std::pair{std::function(gelu_tanh), sg::TensorShape{150, 130}},
                                    std::pair{std::function(sg::swiglu), sg::TensorShape{150, 260}});
  const OpCase test      = one_input(shape, op);
  const auto found       = sg::testing::gradients(test).inputs[0];
  const auto x = sg::testing::values(test).inputs[0], dy = sg::testing::output_gradient(test);
  double along = 0;  // the derivative along the input itself
  for (std::size_t i = 0; i < x.size(); ++i) along += found[i] * x[i];
  const auto scaled = [&](double by) {
    const OpCase moved = one_input(shape, [by, &op](sg::Tape& tape, const sg::Tensor& in) {
      const sg::Tensor y = tape.tensor("scaled", in.shape);
      tape.add({.op = "scaled", .reads = in, .writes = y}, [by](const sg::Context& context, auto zero) {
        using T       = decltype(zero);
        const auto to = context.write<T>();
        for (std::size_t i = 0; i < to.size(); ++i) to[i] = static_cast<T>(context.read<T>()[i] * by);
      });
      return op(tape, y);
    });
    const auto y       = sg::testing::evaluate(moved);
    double sum         = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * dy[i];
    return sum;
  };
  const double expected = (scaled(1 + 1e-6) - scaled(1 - 1e-6)) / 2e-6;
  CHECK(std::abs(along - expected) < 1e-5 * std::abs(expected));
}

TEST_CASE("the vectorisable exponential is within 2 units in the last place of exp, and handles its limits",
          "[ops][activation][exp]") {
  double worst = 0;
  for (float x = -87; x < 88.3F; x += 0.00137F) {
    const double exact = std::exp(static_cast<double>(x));
    const double ulp =
        std::nextafter(static_cast<float>(exact), 1e38F) - static_cast<double>(static_cast<float>(exact));
    worst = std::max(worst, std::abs(static_cast<double>(sg::cpu::exp(x)) - exact) / ulp);
  }
  CHECK(worst < 2);
  CHECK(sg::cpu::exp(0.0F) == 1);
  CHECK(sg::cpu::exp(-1000.0F) == 0);
  CHECK(sg::cpu::exp(-std::numeric_limits<float>::infinity()) == 0);
  CHECK(std::isinf(sg::cpu::exp(100.0F)));
  CHECK(std::isinf(sg::cpu::exp(std::numeric_limits<float>::infinity())));
  CHECK(std::isnan(sg::cpu::exp(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("swiglu refuses rows of odd length", "[ops][activation][refuses]") {
  CHECK_THROWS_MATCHES(sg::testing::evaluate(one_input({2, 5}, sg::swiglu)), sg::Error,
                       MessageMatches(ContainsSubstring("swiglu: rows of 5 elements in 2x5")));
}

TEST_CASE("activations in bf16 and f16 are those in f32, rounded", "[ops][activation]") {
  check_halves(one_input({30, 101}, gelu_tanh));
  check_halves(one_input({30, 101}, gelu_exact));
  check_halves(one_input({30, 101}, sg::silu));
  check_halves(one_input({30, 202}, sg::swiglu));
}
