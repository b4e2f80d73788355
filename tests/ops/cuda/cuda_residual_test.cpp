#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "ops/layers/dropout.hpp"
#include "ops/layers/residual.hpp"
#include "tests/support/ops/device_case.hpp"

namespace sg = stepgraph;
using sg::testing::check_on_device;
using sg::testing::OpCase;

namespace {

OpCase residual_case(std::int64_t rows, std::int64_t width, bool biased, double rate) {
  OpCase test{.inputs = {{rows, width}, {rows, width}}, .sequences = rows};
  if (biased) test.weights = {{"bias", {width}}};
  if (rate > 0) test.step = 8;
  test.build = [biased, rate](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    sg::Residual spec{.x = in[0], .branch = in[1], .dropout = {.rate = rate, .site = "branch"}};
    if (biased) spec.bias = tape.weight("bias");
    return sg::residual(tape, spec);
  };
  return test;
}

}  // namespace

TEST_CASE("a residual on a device equals that on the CPU", "[ops][cuda][residual]") {
  const auto [rows, width] = GENERATE(std::pair{1, 1}, std::pair{6, 37}, std::pair{700, 72});
  const bool biased        = GENERATE(false, true);
  const double rate        = GENERATE(0.0, 0.3);
  CAPTURE(rows, width, biased, rate);
  check_on_device(residual_case(rows, width, biased, rate));
}

TEST_CASE("a bias gradient on a device sums thousands of rows", "[ops][cuda][residual]") {
  check_on_device(residual_case(2500, 24, true, 0));
  check_on_device(residual_case(70, 1000, true, 0));
}

TEST_CASE("a bias gradient on a device may have more columns than counters", "[ops][cuda][residual]") {
  check_on_device(residual_case(3, 140'001, true, 0));
}

TEST_CASE("a dropout on a device drops the same elements as the CPU", "[ops][cuda][dropout]") {
  const auto [rows, width] = GENERATE(std::pair{4, 37}, std::pair{600, 40});
  CAPTURE(rows, width);
  const OpCase test{.inputs    = {{rows, width}},
                    .sequences = rows,
                    .build =
                        [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                          return sg::dropout(tape, in[0], {.rate = 0.3, .site = "embedding"});
                        },
                    .step = 4};
  check_on_device(test);
}

TEST_CASE("a gradient passed on to a tensor that has one is added on a device", "[ops][cuda][tape]") {
  // x is used twice, and both uses pass its gradient on unchanged.
  const auto [rows, width] = GENERATE(std::pair{5, 7}, std::pair{64, 96});
  CAPTURE(rows, width);
  check_on_device(
      {.inputs = {{rows, width}, {rows, width}}, .build = [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
         const sg::Tensor sum = sg::residual(tape, {.x = in[0], .branch = in[1]});
         return sg::residual(tape, {.x = in[0], .branch = sum});
       }});
}
