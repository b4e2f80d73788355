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

TEST_CASE("StepOptions::offload says when updates run, instead of the plan", "[graphs][offload]") {
  const sg::OffloadAmounts optimizer{.optimizer = 1}, others{.grads = 1, .params = 1};
  const auto step_of = [](const sg::OffloadPlan& offload, const sg::OffloadAmounts& amounts, double clip = 1) {
    return sg::training_step(small_gpt2(), {.offload = offload, .optimizer = {.clip = clip}}, batch,
                             {.offload = amounts});
  };
  CHECK(step_of({}, optimizer).update_first);
  CHECK(step_of({.params = true}, optimizer).update_first);
  CHECK_FALSE(step_of({.optimizer = true}, others).update_first);
  CHECK_FALSE(step_of({.optimizer = true, .overlap = false}, optimizer).update_first);
  // The graph is that of the fields.
  const sg::Plan moves{.offload = {.optimizer = true}};
  CHECK(step_of({}, optimizer).graph == sg::training_step(small_gpt2(), moves, batch).graph);
  const sg::StepGraph plain = sg::training_step(small_gpt2(), {}, batch);
  CHECK(step_of({.optimizer = true}, {}).graph == plain.graph);
  // Without clipping, updates are in the backward pass.
  CHECK_FALSE(step_of({}, optimizer, 0).update_first);
  CHECK(step_of({}, optimizer, 0).offload.settings.early_updates);
  CHECK_FALSE(step_of({.optimizer = true}, others, 0).offload.settings.early_updates);
}

TEST_CASE("a forward step has only the weights of what a training step moves", "[graphs][offload]") {
  const std::vector<sg::ActivationMode> layers(4, sg::ActivationMode::offload);
  const sg::OffloadAmounts chosen{
      .optimizer = 1, .grads = 1, .params = 0.5, .activations = 1, .resident_bytes = 100, .layers = layers};
  const auto forward = [](const sg::StepOptions& options) {
    return sg::forward_step(small_gpt2(), {}, batch, sg::ForwardResult::loss, options);
  };
  const sg::StepGraph weights = forward({.offload = sg::OffloadAmounts{.params = 0.5}});
  REQUIRE_FALSE(weights.offload.units.empty());
  CHECK(forward({.offload = chosen}).graph == weights.graph);
  CHECK(forward({.offload_of = {{sg::Rank{0}, chosen}}}).graph == weights.graph);
  CHECK(forward({.offload = chosen}).offload.amounts == sg::OffloadAmounts{.params = 0.5});
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
  static int seen   = 0;
  const bool is_odd = seen++ % 2 != 0;
  if (sg::testing::sanitized() && is_odd != (others == 7)) return;  // each layout with one of the two
  CAPTURE(others);
  const int steps     = sg::testing::sanitized() ? 2 : 3;
  const auto expected = train(small_gpt2(), plain, batch, steps);
  for (const bool overlap : {true, false}) {
    sg::Plan plan = plain;
    plan.offload  = offload_of(others, overlap);
    CHECK(train(small_gpt2(), plan, batch, steps) == expected);
  }
}
