#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "ops/layers/norm.hpp"
#include "ops/layers/residual_norm.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using sg::testing::check_on_device;
using sg::testing::OpCase;

namespace {

struct Shape {
  std::int64_t rows, width;
};

OpCase norm_case(const Shape& shape, bool centered) {
  OpCase test{.inputs = {{shape.rows, shape.width}}, .weights = {{"weight", {shape.width}}}};
  if (centered) test.weights.emplace_back("bias", sg::TensorShape{shape.width});
  test.build = [centered](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    if (!centered) return sg::rms_norm(tape, {.x = in[0], .weight = tape.weight("weight")});
    return sg::layer_norm(tape, {.x = in[0], .weight = tape.weight("weight"), .bias = tape.weight("bias")});
  };
  return test;
}

// The case returns normed + y, so that both outputs are used.
OpCase residual_norm_case(const Shape& shape, bool centered, bool biased, double rate) {
  const auto [rows, width] = shape;
  OpCase test{.inputs = {{rows, width}, {rows, width}}, .weights = {{"weight", {width}}}, .sequences = rows};
  if (centered) test.weights.emplace_back("norm bias", sg::TensorShape{width});
  if (biased) test.weights.emplace_back("bias", sg::TensorShape{width});
  if (rate > 0) test.step = 2;
  test.build = [=](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    sg::ResidualNorm spec{.x = in[0], .branch = in[1], .norm_weight = tape.weight("weight")};
    if (biased) spec.bias = tape.weight("bias");
    if (centered) spec.norm_bias = tape.weight("norm bias");
    spec.dropout                  = {.rate = rate, .site = "branch"};
    const sg::ResidualNormed made = sg::residual_norm(tape, spec);
    return sg::residual(tape, {.x = made.y, .branch = made.normed});
  };
  return test;
}

}  // namespace

TEST_CASE("norms on a device equal those on the CPU, for rows of any length", "[ops][cuda][norm]") {
  // Rows that are not whole vectors; rows for one warp and for blocks of each size; rows longer than the registers
  // hold.
  const Shape shape   = GENERATE(Shape{3, 5}, Shape{70, 37}, Shape{9, 768}, Shape{7, 1024}, Shape{6, 1600},
                                 Shape{5, 4096}, Shape{3, 8192}, Shape{2, 16384}, Shape{2, 20000});
  const bool centered = GENERATE(false, true);
  CAPTURE(shape.rows, shape.width, centered);
  check_on_device(norm_case(shape, centered));
}

TEST_CASE("norms on a device support f32 weights", "[ops][cuda][norm]") {
  const Shape shape   = GENERATE(Shape{70, 37}, Shape{9, 768}, Shape{6, 1600});
  const bool centered = GENERATE(false, true);
  CAPTURE(shape.rows, shape.width, centered);
  OpCase test       = norm_case(shape, centered);
  test.wide_weights = true;
  check_on_device(test, {sg::DType::bf16, sg::DType::f16});
}

TEST_CASE("a norm's weight gradients on a device add up many rows", "[ops][cuda][norm]") {
  check_on_device(norm_case({1500, 40}, true));
  check_on_device(norm_case({1001, 19}, false));
  const std::int64_t many = sg::testing::sanitized() ? 1033 : 4133;
  check_on_device(norm_case({many, 264}, true));  // several tiles of columns and many blocks of rows
  check_on_device(norm_case({many, 264}, false));
}

TEST_CASE("a residual with its norm on a device equals that on the CPU", "[ops][cuda][residual_norm]") {
  const Shape shape   = GENERATE(Shape{3, 21}, Shape{70, 296}, Shape{5, 1600});
  const bool centered = GENERATE(false, true), biased = GENERATE(false, true);
  const double rate = GENERATE(0.0, 0.4);
  CAPTURE(shape.rows, shape.width, centered, biased, rate);
  check_on_device(residual_norm_case(shape, centered, biased, rate));
}
