#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "ops/layers/linear.hpp"
#include "ops/layers/residual.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/ops/op_case.hpp"

namespace sg = stepgraph;

namespace {

struct Sizes {
  std::int64_t rows, in, out;
};

sg::testing::OpCase linear_case(const Sizes& sizes, sg::WeightLayout layout, bool biased,
                                sg::Activation activation = sg::Activation::none) {
  sg::testing::OpCase test{
      .inputs  = {{sizes.rows, sizes.in}},
      .weights = {{"w", layout == sg::WeightLayout::in_out ? sg::TensorShape{sizes.in, sizes.out}
                                                           : sg::TensorShape{sizes.out, sizes.in}}}};
  if (biased) test.weights.emplace_back("b", sg::TensorShape{sizes.out});
  test.build = [layout, biased, activation](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    sg::Linear spec{.x = in[0], .weight = tape.weight("w"), .layout = layout, .activation = activation};
    if (biased) spec.bias = tape.weight("b");
    return sg::linear(tape, spec);
  };
  return test;
}

// Gradients that accumulate: in[0] is used by two linears, the input of the second by it and by a residual, and the
// weight by all three.
sg::testing::OpCase shared_case(const Sizes& sizes) {
  auto test  = linear_case(sizes, sg::WeightLayout::out_in, true);
  test.build = [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    const sg::Linear first{.x = in[0], .weight = tape.weight("w"), .bias = tape.weight("b")};
    const sg::Tensor y = sg::linear(tape, first);
    sg::Linear second  = first;
    second.x           = y;
    const sg::Tensor z = sg::residual(tape, {.x = y, .branch = sg::linear(tape, second)});
    return sg::residual(tape, {.x = z, .branch = sg::linear(tape, first)});
  };
  return test;
}

}  // namespace

TEST_CASE("linear on a device equals linear on the CPU, for both weight layouts", "[ops][cuda][linear]") {
  const auto layout = GENERATE(sg::WeightLayout::in_out, sg::WeightLayout::out_in);
  const bool biased = GENERATE(false, true);
  // One element; odd sizes; multiples of every vector.
  const Sizes sizes = GENERATE(Sizes{1, 1, 1}, Sizes{5, 7, 3}, Sizes{101, 67, 131}, Sizes{384, 256, 128});
  CAPTURE(static_cast<int>(layout), biased, sizes.rows);
  sg::testing::check_on_device(linear_case(sizes, layout, biased),
                               {sg::DType::f32, sg::DType::f64, sg::DType::bf16, sg::DType::f16});
}

TEST_CASE("a linear with an activation on a device equals that on the CPU, forward and backward",
          "[ops][cuda][linear]") {
  const auto activation = GENERATE(sg::Activation::gelu_tanh, sg::Activation::gelu_exact, sg::Activation::silu);
  const bool biased     = GENERATE(false, true);
  // The epilogue can apply the gelu only if rows are whole vectors.
  const Sizes sizes = GENERATE(Sizes{5, 7, 3}, Sizes{67, 33, 77}, Sizes{256, 128, 192});
  CAPTURE(static_cast<int>(activation), biased, sizes.rows);
  auto test  = linear_case(sizes, sg::WeightLayout::in_out, biased, activation);
  test.range = 3;
  sg::testing::check_on_device(test);
}

TEST_CASE("a product's gradient through an activation on a device equals that on the CPU", "[ops][cuda][linear]") {
  const auto activation = GENERATE(sg::Activation::gelu_tanh, sg::Activation::gelu_exact, sg::Activation::silu);
  const auto layout     = GENERATE(sg::WeightLayout::in_out, sg::WeightLayout::out_in);
  // The epilogue can apply the gradient of the gelu only if rows of `in` are whole vectors.
  const Sizes sizes = GENERATE(Sizes{5, 7, 3}, Sizes{67, 77, 33}, Sizes{256, 192, 128});
  CAPTURE(static_cast<int>(activation), static_cast<int>(layout), sizes.rows);
  auto test = linear_case(sizes, layout, false);
  test.weights.emplace_back("up", sg::TensorShape{sizes.in, sizes.in});
  test.weights.emplace_back("up bias", sg::TensorShape{sizes.in});
  test.build = [activation, down = test.build](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    return down(
        tape,
        {sg::linear(
            tape,
            {.x = in[0], .weight = tape.weight("up"), .bias = tape.weight("up bias"), .activation = activation})});
  };
  sg::testing::check_on_device(test);
}

TEST_CASE("gradients of two linears of one input add up on a device, and so do those of a weight used twice",
          "[ops][cuda][linear]") {
  const Sizes sizes = GENERATE(Sizes{6, 5, 5}, Sizes{128, 64, 64});
  CAPTURE(sizes.rows);
  sg::testing::check_on_device(shared_case(sizes));
}

TEST_CASE("products that are measured when first seen give correct results, also when added to a base",
          "[ops][cuda][linear]") {
  sg::testing::need_device();
  const Sizes large{1024, 768, 768};  // more than 10^9 flops
  sg::testing::check_on_device(shared_case(large), {sg::DType::f32, sg::DType::bf16});
  auto active  = linear_case(large, sg::WeightLayout::in_out, true, sg::Activation::gelu_tanh);
  active.range = 0.5;
  sg::testing::check_on_device(active, {sg::DType::bf16});
}
