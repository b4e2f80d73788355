#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "backends/loopback/world.hpp"
#include "graphs/schedule/kinds.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::testing::History;
using sg::testing::small_gpt2;
using sg::testing::small_llama;
using sg::testing::train;

namespace {

constexpr double rate = 0.2;
constexpr sg::BatchSpec batch{.global = 8, .micro = 1, .seq = 16};
constexpr sg::OptimizerPlan optimizer{.lr = 1e-2, .clip = 0.05};

}  // namespace

TEST_CASE("dropout has the same bits in every pipeline split, schedule, recomputation and number of threads",
          "[graphs][dropout]") {
  const auto model    = GENERATE(small_gpt2, small_llama)(rate);
  const auto [dp, tp] = GENERATE(std::pair{1, 1}, std::pair{2, 2});
  if (sg::testing::scale() > 1 && dp == 1) return;
  CAPTURE(model.kind, dp, tp);
  const sg::Plan plain{.layout = {.dp = dp, .tp = tp}, .optimizer = optimizer};
  const History reference = train(model, plain, batch, 4, {.threads = 1, .seed = 7});
  static int seen         = 2;
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1", "zb-h2"}) {
    for (const auto recompute : {sg::Recompute::none, sg::Recompute::selective, sg::Recompute::full}) {
      if (sg::testing::scale() > 1 && recompute != sg::Recompute::full) continue;
      if (sg::testing::left_out(seen, 3)) continue;
      sg::Plan plan  = plain;
      plan.layout.pp = 2;
      plan.pipeline  = {.schedule = schedule};
      plan.recompute = recompute;
      CAPTURE(schedule, recompute);
      CHECK(train(model, plan, batch, 4) == reference);
    }
  }
}

TEST_CASE("dropout has the same mask in every layout", "[graphs][dropout]") {
  const auto model = GENERATE(small_gpt2, small_llama)(rate);
  const sg::Plan one{.precision = {.param = sg::DType::f64}, .optimizer = optimizer};
  const History reference = train(model, one, batch, 3);
  for (sg::LayoutSpec layout :
       {sg::LayoutSpec{.dp = 2}, {.dp = 8}, {.tp = 2}, {.tp = 4}, {.dp = 2, .tp = 2, .pp = 2}}) {
    for (const bool shares : {false, true}) {
      if (shares && layout.tp == 1) continue;
      if (sg::testing::scale() > 1 && !shares) continue;
      sg::Plan plan                 = one;
      plan.layout                   = layout;
      plan.layout.sequence_parallel = shares;
      CAPTURE(model.kind, to_string(plan.layout));
      const History history = train(model, plan, batch, 3);
      CHECK(sg::testing::loss_distance(history, reference) < 1e-12);
      CHECK(sg::testing::norm_distance(history, reference) < 1e-10);
    }
  }
  // The size of a microbatch does not change the mask of a sequence either.
  CHECK(sg::testing::loss_distance(train(model, one, {.global = 8, .micro = 4, .seq = 16}, 3), reference) < 1e-12);
}

TEST_CASE("dropout depends on the seed and the step, and is off in evaluation", "[graphs][dropout]") {
  const sg::Plan plan{.optimizer = {.lr = 0}};  // weights are constant, so only masks can change a loss
  const History one = train(small_gpt2(rate), plan, batch, 4), other = train(small_gpt2(rate), plan, batch, 4);
  CHECK(one == other);
  CHECK(one.loss[0] != one.loss[2]);  // the same tokens
  CHECK(one.loss[1] != one.loss[3]);
  const History none = train(small_gpt2(), plan, batch, 4);
  CHECK(none.loss[0] == none.loss[2]);
  CHECK(one.loss[0] != none.loss[0]);

  // The weights are set explicitly, so that the seed affects only dropout.
  const auto first_loss = [&](std::uint64_t seed) {
    sg::LoopbackWorld world(1);
    sg::Trainer trainer(small_gpt2(rate), plan, batch, world, {.threads = 2, .seed = seed});
    sg::set_fresh_weights(trainer.run(), 7);
    return trainer.step(sg::testing::tokens_for(batch, 0, 64)).loss;
  };
  CHECK(first_loss(7) == one.loss[0]);
  CHECK(first_loss(8) != one.loss[0]);

  sg::LoopbackWorld world(1);
  sg::Evaluator dropping(small_gpt2(rate), plan, batch, world), plain(small_gpt2(), plan, batch, world);
  for (sg::Evaluator* each : {&dropping, &plain}) sg::set_fresh_weights(each->run(), 7);
  const auto tokens = sg::testing::tokens_for(batch, 0, 64);
  CHECK(dropping.loss(tokens) == plain.loss(tokens));
  CHECK(plain.loss(tokens) == none.loss[0]);
}
