#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "ops/layers/activation.hpp"
#include "tests/support/ops/device_case.hpp"

namespace sg = stepgraph;
using sg::testing::check_on_device;
using sg::testing::OpCase;

namespace {

OpCase one_input(sg::TensorShape shape, const std::function<sg::Tensor(sg::Tape&, const sg::Tensor&)>& op) {
  return {.inputs = {std::move(shape)},
          .build  = [op](sg::Tape& tape, const std::vector<sg::Tensor>& in) { return op(tape, in[0]); },
          .range  = 6};
}

sg::Tensor gelu_tanh(sg::Tape& tape, const sg::Tensor& x) { return sg::gelu(tape, x); }
sg::Tensor gelu_exact(sg::Tape& tape, const sg::Tensor& x) { return sg::gelu(tape, x, sg::Gelu::exact); }

}  // namespace

TEST_CASE("activations on a device equal those on the CPU", "[ops][cuda][activation]") {
  // Less than a vector, vectors with a tail, and several blocks.
  const sg::TensorShape shape = GENERATE(sg::TensorShape{1, 3}, sg::TensorShape{7, 37}, sg::TensorShape{96, 320});
  CAPTURE(sg::to_string(shape));
  check_on_device(one_input(shape, gelu_tanh));
  check_on_device(one_input(shape, gelu_exact));
  check_on_device(one_input(shape, sg::silu));
}

TEST_CASE("swiglu on a device equals that on the CPU", "[ops][cuda][activation]") {
  const auto [rows, width] = GENERATE(std::pair{1, 1}, std::pair{5, 37}, std::pair{67, 256});
  CAPTURE(rows, width);
  check_on_device(one_input({rows, 2 * width}, sg::swiglu));
}
