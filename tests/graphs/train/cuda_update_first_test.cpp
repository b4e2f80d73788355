// Steps on a GPU that begin with the update of the step before them, captured or not.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "tests/support/ops/device_case.hpp"
#include "tests/support/training/device_training.hpp"

namespace sg = stepgraph;
using sg::testing::train_on_device;

TEST_CASE("on a GPU a step that begins with the update before it has the same bits", "[graphs][cuda][update_first]") {
  sg::testing::need_device();
  const bool capture  = GENERATE(false, true);
  const auto type     = GENERATE(sg::DType::f32, sg::DType::bf16);
  const auto strategy = GENERATE(sg::Shard::none, sg::Shard::zero1, sg::Shard::full);
  CAPTURE(capture, type, to_string(strategy));
  const sg::Plan plan{
      .layout = {.dp = 2}, .shard = {.strategy = strategy, .min_params = 50}, .precision = {.param = type}};
  CHECK(train_on_device(plan, {.capture = capture, .update_first = true, .steps = 6}) ==
        train_on_device(plan, {.capture = capture, .steps = 6}));
}
