#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>

#include "backends/loopback/world.hpp"
#include "engine/plan/memory_plan.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::testing::History;
using sg::testing::small_gpt2;
using sg::testing::small_llama;
using sg::testing::train;

namespace {

constexpr sg::BatchSpec batch{.global = 8, .micro = 2, .seq = 16};

sg::Plan kept_plan(sg::DType param, sg::DType reduce, const sg::LayoutSpec& layout) {
  return {.layout    = layout,
          .precision = {.param = param, .reduce = reduce, .keep_low_precision_grads = true},
          .optimizer = {.lr = 3e-3}};
}
sg::Plan widened(sg::Plan plan) {
  plan.precision.keep_low_precision_grads = false;
  return plan;
}

sg::Plan norm_plan(sg::DType param, const sg::LayoutSpec& layout = {}) {
  return {.layout = layout, .precision = {.param = param, .norm = sg::DType::f32}, .optimizer = {.lr = 3e-3}};
}

}  // namespace

TEST_CASE("low-precision gradients give the same bits as widened ones if nothing is added to them",
          "[graphs][precision]") {
  const auto param  = GENERATE(sg::DType::f32, sg::DType::f16);
  const auto reduce = GENERATE(sg::DType::bf16, sg::DType::f16);
  const auto kind   = GENERATE(sg::OptimizerKind::adamw, sg::OptimizerKind::sgd);
  CAPTURE(param, reduce, kind == sg::OptimizerKind::sgd);
  const sg::Model model = sg::gpt2({.layers = 2, .width = 32, .heads = 4, .context = 16, .vocab = 64, .tied = false});
  sg::Plan plan         = kept_plan(param, reduce, {.dp = 2, .pp = 2});
  plan.optimizer.kind   = kind;
  CHECK((train(model, plan, batch, 4) == train(model, widened(plan), batch, 4)));
}

TEST_CASE("low-precision gradients have the same bits in every pipeline split and schedule", "[graphs][precision]") {
  const auto model        = GENERATE(small_gpt2, small_llama)(0);  // both have a tied weight
  const auto type         = GENERATE(sg::DType::bf16, sg::DType::f16);
  const bool sequence     = type == sg::DType::f16;
  const History reference = train(model, kept_plan(type, type, {.dp = 2, .tp = 2, .sequence_parallel = sequence}),
                                  batch, 4, {.threads = 1, .seed = 7});
  for (const char* schedule : {"1f1b", "zb-h2"}) {
    if (sg::testing::scale() > 1 && std::string(schedule) != "1f1b") continue;
    CAPTURE(model.kind, type, sequence, schedule);
    sg::Plan plan = kept_plan(type, type, {.dp = 2, .tp = 2, .pp = 2, .sequence_parallel = sequence});
    plan.pipeline = {.schedule = schedule};
    CHECK((train(model, plan, batch, 4) == reference));
  }
}

TEST_CASE("training with low-precision gradients follows fp32, and the gradients can be read", "[graphs][precision]") {
  const auto model    = small_gpt2();
  const auto type     = GENERATE(sg::DType::bf16, sg::DType::f16);
  const sg::Plan plan = kept_plan(sg::DType::f32, type, {.dp = 2, .pp = 2}),
                 full{.layout = plan.layout, .optimizer = plan.optimizer};
  const double bound = type == sg::DType::bf16 ? 1e-3 : 2e-4;
  CHECK(sg::testing::loss_distance(train(model, plan, batch, 20), train(model, full, batch, 20)) < bound);
  const auto gradient = [&](const sg::Plan& of) {
    sg::LoopbackWorld world(4);
    sg::Trainer trainer(model, of, batch, world, {.threads = 2, .keep_gradients = true, .seed = 7});
    static_cast<void>(trainer.step(sg::testing::tokens_for(batch, 0, model.vocab)));
    std::vector<double> found(64 * 32);  // of the tied weight
    trainer.run().read_tensor(sg::StepRun::Which::gradient, "transformer.wte.weight", found);
    return found;
  };
  const std::vector<double> rounded = gradient(plan), exact = gradient(full);
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    difference += (rounded[i] - exact[i]) * (rounded[i] - exact[i]);
    size += exact[i] * exact[i];
  }
  CHECK(difference > 0);
  CHECK(std::sqrt(difference / size) < (type == sg::DType::bf16 ? 0x1p-8 : 0x1p-11));
}

TEST_CASE("low-precision gradients take less memory, and no node widens them", "[graphs][precision]") {
  const auto step_bytes = [](const sg::Plan& plan, int& widens) {
    // Weight gradients are most of the step memory, and there is one microbatch per rank.
    const sg::StepGraph step = sg::training_step(small_gpt2(), plan, {.global = 2, .micro = 1, .seq = 1});
    widens                   = 0;
    for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i)
      widens += step.graph.spec(sg::Node{i}).name.starts_with("widen gradient");
    const sg::ArenaPlan arena = sg::plan_memory(step.graph).arena(sg::Rank{0});
    return static_cast<double>(arena.lower_bound - arena.persistent_bytes);
  };
  sg::Plan plan        = kept_plan(sg::DType::bf16, sg::DType::bf16, {.dp = 2});
  plan.shard.bucket_mb = 1e-9;  // small buckets, because each exists twice while it is rounded
  int widens           = 0;
  const double kept    = step_bytes(plan, widens);
  CHECK(widens == 0);
  const double full = step_bytes(widened(plan), widens);
  CHECK(widens > 0);
  CAPTURE(kept / full);
  CHECK(kept < 0.85 * full);
}

TEST_CASE("norm weights are f32 if the plan says so, and need no master", "[graphs][precision]") {
  const auto model = GENERATE(small_gpt2, small_llama)(0);
  const auto type  = GENERATE(sg::DType::bf16, sg::DType::f16);
  CAPTURE(model.kind, type);
  const sg::StepGraph step = sg::training_step(model, norm_plan(type, {.dp = 2, .tp = 2, .pp = 2}), batch);
  int norms                = 0;
  for (const sg::StepRank& rank : step.ranks) {
    for (const sg::StepWeight& weight : rank.weights) {
      const sg::WeightSpec& spec = step.spec(weight);
      const bool is_norm         = spec.name.find("ln_") != spec.name.npos || spec.name.find("norm") != spec.name.npos;
      CAPTURE(spec.name);
      CHECK(step.graph.spec(weight.value.buffer).type == (is_norm ? sg::DType::f32 : type));
      if (is_norm) CHECK(weight.master.empty());
      norms += is_norm;
    }
  }
  CHECK(norms > 8);
}

TEST_CASE("training with norms in f32 follows fp32, and has the same bits in every pipeline split",
          "[graphs][precision]") {
  const auto model = GENERATE(small_gpt2, small_llama)(0);
  const auto type  = GENERATE(sg::DType::bf16, sg::DType::f16);
  CAPTURE(model.kind, type);
  if (sg::testing::scale() > 1 && (type == sg::DType::bf16) == (model.kind == "gpt2")) return;
  const int steps         = sg::testing::scale() > 1 ? 3 : 8;
  const sg::Plan plan     = norm_plan(type, {.dp = 2, .tp = 2});
  const History reference = train(model, plan, batch, steps, {.threads = 1, .seed = 7});
  CHECK((train(model, norm_plan(type, {.dp = 2, .tp = 2, .pp = 2}), batch, steps) == reference));
  sg::Plan rounded       = plan;
  rounded.precision.norm = {};
  CHECK((train(model, rounded, batch, steps) != reference));
  const sg::Plan full{.layout = plan.layout, .optimizer = plan.optimizer};
  CHECK(sg::testing::loss_distance(reference, train(model, full, batch, steps)) <
        (type == sg::DType::bf16 ? 1e-2 : 2e-3));
}
