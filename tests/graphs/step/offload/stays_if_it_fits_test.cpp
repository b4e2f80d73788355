// With device_bytes and strategy manual, nothing moves where all fits.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/step/training_step.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr sg::BatchSpec batch{.global = 2, .micro = 2, .seq = 16};

sg::Model model_of() { return sg::gpt2({.layers = 4, .width = 64, .heads = 4, .context = 16, .vocab = 128}); }

std::int64_t device_bytes(const sg::StepGraph& step) {
  const sg::MemoryPlan plan = sg::plan_memory(step.graph);
  std::int64_t most         = 0;
  for (const sg::Rank rank : step.graph.ranks()) most = std::max(most, plan.device_bytes(rank));
  return most;
}

}  // namespace

TEST_CASE("nothing moves where device_bytes is enough without offload", "[graphs][offload]") {
  const sg::LayoutSpec layout = GENERATE(sg::LayoutSpec{}, sg::LayoutSpec{.pp = 2}, sg::LayoutSpec{.dp = 2});
  const int classes           = GENERATE(1, 2, 4, 8, 15);
  static int seen             = 0;
  if (sg::testing::left_out(seen, 2)) return;
  constexpr sg::BatchSpec two{.global = 4, .micro = 1, .seq = 16};
  sg::Plan plan{.layout  = layout,
                .offload = {.params      = (classes & 1) != 0,
                            .grads       = (classes & 2) != 0,
                            .optimizer   = (classes & 4) != 0,
                            .activations = (classes & 8) != 0}};
  if (plan.offload.optimizer) plan.offload.overlap = false;
  CAPTURE(to_string(layout), classes);
  const sg::StepGraph plain = sg::training_step(model_of(), {.layout = layout}, two);
  std::int64_t whole        = 0;
  for (const sg::Rank rank : plain.graph.ranks())
    whole = std::max(whole, sg::plan_memory(sg::slice(plain.graph, rank)).device_bytes(rank));
  // Of several ranks 1/64 is spared.
  plan.offload.device_bytes = layout == sg::LayoutSpec{} ? whole : whole + whole / 63 + 1;
  const sg::StepGraph step  = sg::training_step(model_of(), plan, two);
  CHECK(step.offload.units.empty());
  CHECK(step.graph == plain.graph);
  if (!plan.offload.optimizer) return;  // other classes need slots, which can be larger than what they save here
  plan.offload.device_bytes = whole - whole / 20;
  CHECK_FALSE(sg::training_step(model_of(), plan, two).offload.units.empty());
}

TEST_CASE("an evaluation moves no weights where device_bytes is enough", "[graphs][offload]") {
  const auto forward = [](const sg::OffloadPlan& offload) {
    return sg::forward_step(model_of(), {.offload = offload}, batch);
  };
  const std::int64_t whole = device_bytes(forward({}));
  CHECK(forward({.params = true, .device_bytes = whole}).offload.units.empty());
  CHECK_FALSE(forward({.params = true, .device_bytes = whole - 1}).offload.units.empty());
}

TEST_CASE("ranks that stay by their slices move where the plan of all ranks needs more", "[graphs][offload]") {
  const sg::Model model = sg::gpt2({.layers = 2, .width = 32, .heads = 2, .context = 16, .vocab = 64});
  sg::Plan plan{.layout = {.pp = 2}};
  const std::int64_t whole = device_bytes(sg::training_step(model, plan, batch));
  plan.offload             = {.optimizer = true, .device_bytes = whole - whole / 10};
  // As if the slices were so small that nothing moves.
  const sg::StepOptions stay{.offload_of = {{sg::Rank{0}, {}}, {sg::Rank{1}, {}}}};
  const sg::StepGraph step = sg::training_step(model, plan, batch, stay);
  CHECK_FALSE(step.offload.units.empty());
  CHECK(device_bytes(step) <= plan.offload.device_bytes);
  // If that does not fit either, the step is refused.
  plan.offload.device_bytes = whole / 100;
  CHECK_THROWS_WITH(sg::training_step(model, plan, batch, stay), ContainsSubstring("offload.device_bytes: rank "));
  // A process with a part of the ranks moves what all processes have agreed on.
  plan.offload.device_bytes = whole / 2;
  sg::StepOptions part      = stay;
  part.only                 = sg::Rank{0};
  CHECK_THROWS_WITH(sg::training_step(model, plan, batch, part), ContainsSubstring("offload.device_bytes: rank 0"));
}
