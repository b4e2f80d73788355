#include "graphs/step/memory/likeness.hpp"

#include <catch2/catch_test_macros.hpp>
#include <optional>

#include "graphs/models/gpt2.hpp"
#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/builder/resolve.hpp"
#include "graphs/step/offload/choose/strategy.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::OffloadAmounts;
using sg::OffloadStrategy;

namespace {

constexpr sg::BatchSpec batch{.global = 4, .micro = 2, .seq = 8};

sg::RankKinds kinds_of(const sg::Model& model, const sg::Plan& plan) {
  return {model, sg::resolve(plan, model, batch, true), batch, true};
}

}  // namespace

TEST_CASE("the first of ranks that are alike has data-parallel index 0 and the least tensor-parallel index",
          "[graphs][memory]") {
  const sg::Plan plan{.layout = {.dp = 2, .tp = 2, .pp = 2}};
  const sg::Layout layout(plan.layout);
  sg::RankKinds even = kinds_of(sg::testing::small_gpt2(), plan);
  for (int rank = 0; rank < layout.num_ranks(); ++rank)
    CHECK(even.first_like(sg::Rank{rank}) == layout.rank({.pp = layout.coord(sg::Rank{rank}).pp}));
  // A vocabulary of 33 tokens is cut into 17 and 16.
  sg::RankKinds uneven =
      kinds_of(sg::gpt2({.layers = 2, .width = 16, .heads = 2, .context = 8, .vocab = 33}), {.layout = {.tp = 2}});
  CHECK(uneven.first_like(sg::Rank{0}) == sg::Rank{0});
  CHECK(uneven.first_like(sg::Rank{1}) == sg::Rank{1});
}

TEST_CASE("ranks that are alike share one choice, at the cost of one slice", "[graphs][memory][offload]") {
  const sg::Model model = sg::testing::small_gpt2();
  // Builds of slices until all ranks of a layout, or these alone, have their choice.
  const auto builds = [&](sg::Plan plan, std::optional<sg::RankSet> only) {
    sg::RankKinds kinds = kinds_of(model, plan);
    int count           = 0;
    const auto slice    = [&](sg::Rank rank, const OffloadAmounts& amounts) {
      ++count;
      return sg::build_training_step(model, plan, batch, {.only = rank, .offload = amounts});
    };
    const auto without        = sg::build_training_step(model, plan, batch, {.only = sg::Rank{0}});
    plan.offload.strategy     = OffloadStrategy::balanced;
    plan.offload.device_bytes = sg::plan_memory(without.graph).device_bytes(sg::Rank{0});
    const auto chosen         = sg::choose_amounts(
                plan, {.only = only}, {.build = slice, .first_like = [&](sg::Rank rank) { return kinds.first_like(rank); }});
    CHECK(chosen.size() == (only ? only->size() : static_cast<std::size_t>(sg::Layout(plan.layout).num_ranks())));
    for (const auto& [rank, amounts] : chosen) CHECK(amounts == chosen.begin()->second);
    return count;
  };
  for (const sg::Plan& plan : {sg::Plan{.layout = {.tp = 2}}, sg::Plan{.layout = {.dp = 2, .tp = 2}},
                               sg::Plan{.layout = {.dp = 2, .tp = 2}, .shard = {.strategy = sg::Shard::full}}}) {
    const int alone = builds(plan, sg::Rank{0});
    CHECK(alone > 1);
    CHECK(builds(plan, {}) == alone);
  }
}
