// offload.overlap: the update of a step is in the graph of the next one.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>

#include "graphs/step/training_step.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::testing::small_gpt2;
using sg::testing::train;

namespace {

constexpr sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 8};

sg::OffloadPlan offload_of(int others, bool overlap) {
  return {.params      = (others & 1) != 0,
          .grads       = (others & 2) != 0,
          .optimizer   = true,
          .activations = (others & 4) != 0,
          .overlap     = overlap};
}

}  // namespace

TEST_CASE("the plan says whether the update of an offloaded optimizer comes first", "[graphs][offload]") {
  const auto update_first = [](const sg::OffloadPlan& offload) {
    return sg::training_step(small_gpt2(), {.offload = offload}, batch).update_first;
  };
  CHECK(update_first({.optimizer = true}));
  CHECK_FALSE(update_first({.optimizer = true, .overlap = false}));
  CHECK_FALSE(update_first({.params = true}));
  CHECK_FALSE(update_first({}));
  CHECK_FALSE(sg::forward_step(small_gpt2(), {.offload = {.params = true, .optimizer = true}}, batch).update_first);
}

TEST_CASE("an update beside the next step has the bits of one at the end of its own", "[graphs][offload]") {
  const int others = GENERATE(range(0, 8));
  if (sg::testing::sanitized() && others != 0 && others != 7) return;
  sg::Plan plain;
  SECTION("one rank") {}
  SECTION("zero1") { plain = {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::zero1}}; }
  SECTION("full") { plain = {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::full}}; }
  SECTION("tp 2") { plain = {.layout = {.tp = 2}}; }
  SECTION("pp 2") { plain = {.layout = {.pp = 2}}; }
  SECTION("no clipping") { plain = {.optimizer = {.clip = 0}}; }
  CAPTURE(others);
  const auto expected = train(small_gpt2(), plain, batch, 3);
  for (const bool overlap : {true, false}) {
    sg::Plan plan = plain;
    plan.offload  = offload_of(others, overlap);
    CHECK(train(small_gpt2(), plan, batch, 3) == expected);
  }
}
