// Sharding with types other than fp32: weights are gathered in the type of the ops, gradients are reduced in the type
// of the plan, and shards are kept in fp32.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <cmath>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::Message;
using sg::DType;
using sg::Shard;
using sg::testing::History;
using sg::testing::small_gpt2;
using sg::testing::small_llama;
using sg::testing::train;

namespace {

constexpr sg::BatchSpec batch{.global = 8, .micro = 2, .seq = 16};

sg::Plan plan_of(const sg::LayoutSpec& layout, Shard strategy, const sg::PrecisionPlan& precision) {
  return {.layout    = layout,
          .shard     = {.strategy = strategy, .min_params = 100},
          .precision = precision,
          .optimizer = {.lr = 3e-3}};
}
sg::Plan whole(sg::Plan plan) {
  plan.shard = {};
  return plan;
}

// The first steps overflow at this loss scale.
constexpr sg::LossScale overflows{.scaling = sg::Scaling::dynamic, .value = 0x1p24};

}  // namespace

TEST_CASE("in bf16 and fp16 sharding changes no bits, no loss scales and no skipped steps",
          "[graphs][shard][precision]") {
  const auto model            = GENERATE(small_gpt2, small_llama)(0);
  const DType type            = GENERATE(DType::bf16, DType::f16);
  const Shard strategy        = GENERATE(Shard::zero1, Shard::grad_op, Shard::full);
  const bool flat             = GENERATE(true, false);
  const bool in_3d            = strategy == Shard::full;
  const sg::LayoutSpec layout = in_3d ? sg::LayoutSpec{.dp = 2, .tp = 2, .pp = 2} : sg::LayoutSpec{.dp = 4};
  CAPTURE(model.kind, type, to_string(strategy), flat);
  if (!in_3d && model.kind == "llama") return;
  if (sg::testing::scale() > 1 && (flat || type == DType::bf16 || !in_3d)) return;
  sg::Plan plan   = plan_of(layout, strategy, {.param = type});
  plan.shard.flat = flat;
  if (type == DType::f16) plan.precision.loss_scale = overflows;
  const auto got         = sg::testing::train_scaled(model, plan, batch, 12);
  const auto num_skipped = std::count(got.skipped.begin(), got.skipped.end(), true);
  CHECK((type == DType::f16) == (num_skipped > 2));
  CHECK_FALSE(got.skipped.back());
  CHECK((got == sg::testing::train_scaled(model, whole(plan), batch, 12)));
}

TEST_CASE("gradients reduced in a 2-byte type have the same bits with and without sharding",
          "[graphs][shard][precision]") {
  const DType param    = GENERATE(DType::f32, DType::bf16);
  const DType reduce   = GENERATE(DType::bf16, DType::f16);
  const Shard strategy = GENERATE(Shard::zero1, Shard::grad_op, Shard::full);
  const bool keeps     = GENERATE(false, true);
  CAPTURE(param, reduce, to_string(strategy), keeps);
  if (sg::testing::scale() > 1 && (reduce == DType::bf16 || param == DType::f32)) return;
  const sg::Plan plan =
      plan_of({.dp = 4}, strategy, {.param = param, .reduce = reduce, .keep_low_precision_grads = keeps});
  CHECK((train(small_llama(), plan, batch, 4) == train(small_llama(), whole(plan), batch, 4)));
}

TEST_CASE("a rank's shard of low-precision gradients keeps its type and can be read", "[graphs][shard][precision]") {
  const Shard strategy = GENERATE(Shard::zero1, Shard::grad_op, Shard::full, Shard::hybrid);
  const auto when      = GENERATE(sg::ReduceWhen::last, sg::ReduceWhen::each);
  CAPTURE(to_string(strategy), to_string(when));
  if (when == sg::ReduceWhen::each && strategy == Shard::zero1) return;
  sg::Plan plan =
      plan_of({.dp = 4}, strategy, {.param = DType::bf16, .reduce = DType::bf16, .keep_low_precision_grads = true});
  plan.shard.reduce    = when;
  plan.shard.group     = strategy == Shard::hybrid ? 2 : 0;
  const auto model     = small_gpt2();
  const auto gradients = [&](const sg::Plan& of) {
    sg::LoopbackWorld world(4);
    sg::Trainer trainer(model, of, batch, world, {.threads = 2, .keep_gradients = true, .seed = 7});
    static_cast<void>(trainer.step(sg::testing::tokens_for(batch, 0, model.vocab)));
    for (const sg::StepRank& rank : trainer.run().step().ranks) {
      for (const sg::StepWeight& weight : rank.weights) {
        if (!weight.gradient.empty())
          CHECK(trainer.run().step().graph.spec(weight.gradient.buffer).type == DType::bf16);
      }
    }
    std::vector<float> found(32 * 96);
    trainer.run().read_tensor(sg::StepRun::Which::gradient, "transformer.h.1.attn.c_attn.weight", found);
    return found;
  };
  const auto shared = gradients(plan), expected = gradients(whole(plan));
  if (strategy != Shard::hybrid) {
    CHECK(shared == expected);
    return;
  }
  for (std::size_t i = 0; i < expected.size(); ++i)
    CHECK(std::abs(shared[i] - expected[i]) <= 0x1p-7 * std::abs(expected[i]) + 1e-5);
}

TEST_CASE("fp32 norms stay whole beside sharded 2-byte weights, with the same bits", "[graphs][shard][precision]") {
  const auto model     = GENERATE(small_gpt2, small_llama)(0);
  const Shard strategy = GENERATE(Shard::zero1, Shard::full);
  CAPTURE(model.kind, to_string(strategy));
  sg::Plan plan         = plan_of({.dp = 2, .tp = 2}, strategy, {.param = DType::bf16, .norm = DType::f32});
  plan.shard.min_params = 1;
  CHECK((train(model, plan, batch, 4) == train(model, whole(plan), batch, 4)));
  const sg::StepGraph step = sg::training_step(model, plan, batch);
  for (const sg::StepWeight& weight : step.ranks[0].weights) {
    CAPTURE(step.spec(weight).name);
    CHECK(weight.gradient.sharded == !step.spec(weight).norm);
  }
}

TEST_CASE("low-precision gradients are refused if several microbatches are reduced one by one",
          "[graphs][shard][precision][refuses]") {
  sg::Plan plan =
      plan_of({.dp = 2}, Shard::full, {.param = DType::bf16, .reduce = DType::bf16, .keep_low_precision_grads = true});
  plan.shard.reduce = sg::ReduceWhen::each;
  CHECK_THROWS_MATCHES(
      sg::training_step(small_gpt2(), plan, batch), sg::Error,
      Message("precision.keep_low_precision_grads: true with shard.reduce each and 2 microbatches would round the sum "
              "after each microbatch (false, or shard.reduce last)"));
}
