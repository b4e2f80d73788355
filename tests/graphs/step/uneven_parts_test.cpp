// Vocabulary, MLP width and positions of any size: tensor-parallel ranks have unequal parts.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "graphs/models/weights.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::testing::History;
using sg::testing::train;

namespace {

constexpr sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 16};

// No size is a multiple of 4, and none of the parts are equal.
sg::Model uneven_gpt2() {
  return sg::gpt2({.layers = 4, .width = 32, .heads = 4, .context = 19, .vocab = 61, .inner = 43});
}
sg::Model uneven_llama() {
  return sg::llama(
      {.layers = 4, .width = 32, .heads = 4, .kv_heads = 2, .context = 16, .vocab = 63, .inner = 43, .mlp_bias = true});
}
// Fewer MLP columns than some layouts have ranks in all, as many as tensor-parallel ones.
sg::Model narrow_llama() {
  return sg::llama({.layers = 4, .width = 32, .heads = 4, .context = 16, .vocab = 63, .inner = 5});
}

}  // namespace

TEST_CASE("an MLP width that tp does not divide trains as on one rank, in every layout and sharding",
          "[graphs][step][uneven]") {
  const auto model = GENERATE(uneven_gpt2, uneven_llama, narrow_llama)();
  const bool rows  = GENERATE(false, true);  // sequence parallelism
  CAPTURE(model.kind, model.inner, rows);
  const sg::Plan one{.precision = {.param = sg::DType::f64}, .optimizer = {.lr = 1e-2, .clip = 0.05}};
  const History reference = train(model, one, batch, 2);
  for (const auto& [dp, tp, pp] :
       {std::tuple(1, 4, 1), std::tuple(2, 2, 2), std::tuple(4, 2, 1), std::tuple(2, 4, 2)}) {
    for (const auto strategy :
         {sg::Shard::none, sg::Shard::zero1, sg::Shard::grad_op, sg::Shard::full, sg::Shard::hybrid}) {
      if ((strategy != sg::Shard::none && dp == 1) || (strategy == sg::Shard::hybrid) != (dp == 4)) continue;
      if ((strategy == sg::Shard::zero1 || strategy == sg::Shard::grad_op) && tp != 2) continue;
      if (sg::testing::scale() > 1 && (strategy != sg::Shard::full || tp != 4)) continue;
      sg::Plan plan       = one;
      plan.layout         = {.dp = dp, .tp = tp, .pp = pp, .sequence_parallel = rows};
      plan.shard.strategy = strategy;
      if (strategy == sg::Shard::hybrid) plan.shard.group = 2;
      if (strategy != sg::Shard::none) plan.shard.min_params = 50;
      CAPTURE(sg::to_string(plan.layout), sg::to_string(strategy));
      const History history = train(model, plan, batch, 2);
      CHECK(sg::testing::loss_distance(history, reference) < 1e-12);
      CHECK(sg::testing::norm_distance(history, reference) < 1e-10);
    }
  }
}

TEST_CASE("an MLP width that tp does not divide has the same bits in every pipeline split and sharding",
          "[graphs][step][uneven]") {
  const auto model = GENERATE(uneven_gpt2, uneven_llama)();
  sg::Plan plan{.layout = {.dp = 2, .tp = 4}, .optimizer = {.lr = 1e-2}};
  const History reference = train(model, plan, batch, 3);
  for (const auto strategy : {sg::Shard::none, sg::Shard::zero1, sg::Shard::full}) {
    plan.shard.strategy = strategy;
    plan.layout.pp      = 2;
    CAPTURE(model.kind, sg::to_string(strategy));
    CHECK(train(model, plan, batch, 3) == reference);
  }
}
