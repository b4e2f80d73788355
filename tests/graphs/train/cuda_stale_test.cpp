// Steps on a GPU that apply earlier gradients, captured or not.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "graphs/train/trainer.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/training/delayed_training.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::testing::DelayedRun;

namespace {

DelayedRun train(const sg::Plan& plan, bool capture, int steps) {
  const sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 16};
  const sg::Model model = sg::testing::small_gpt2();
  const auto world      = sg::testing::device_world(sg::Layout(plan.layout).num_ranks(), capture);
  sg::Trainer trainer(model, plan, batch, *world, {.threads = 2, .seed = 7});
  return sg::testing::run_trainer(trainer, 0, steps,
                                  [&](int step) { return sg::testing::tokens_for(batch, step, model.vocab); });
}

}  // namespace

TEST_CASE("on a GPU stale steps have the same bits in every run, captured or not", "[graphs][cuda][stale]") {
  sg::testing::need_device();
  const auto type     = GENERATE(sg::DType::f32, sg::DType::bf16, sg::DType::f16);
  const auto strategy = GENERATE(sg::Shard::none, sg::Shard::zero1, sg::Shard::full);
  const int late      = GENERATE(1, 3);
  CAPTURE(type, to_string(strategy), late);
  sg::Plan plan{.layout    = {.dp = 2},
                .shard     = {.strategy = strategy, .min_params = strategy == sg::Shard::none ? 0 : 50},
                .precision = {.param = type},
                .update    = {.mode = sg::UpdateWhen::stale, .max_staleness = late}};
  if (type == sg::DType::f16)
    plan.precision.loss_scale = {.scaling = sg::Scaling::dynamic, .value = 0x1p22, .growth_steps = 2};
  const DelayedRun run = train(plan, false, 8);
  CHECK((train(plan, true, 8) == run));
  // Until gradients are applied, losses are those of the weights at the start.
  plan.update                  = {};
  const DelayedRun synchronous = train(plan, false, 1);
  CHECK(run.loss.front() == synchronous.loss.front());
  CHECK(run.grad_norm.front() == synchronous.grad_norm.front());
  CHECK(run.updates[static_cast<std::size_t>(late) - 1] == 0);
  if (type != sg::DType::f16) CHECK(run.updates.back() == 8 - late);
}
