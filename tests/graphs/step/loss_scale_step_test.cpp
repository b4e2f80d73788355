#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <cstring>

#include "backends/loopback/world.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::testing::History;
using sg::testing::small_gpt2;
using sg::testing::small_llama;
using sg::testing::tokens_for;
using sg::testing::train;
using sg::testing::training_state;

namespace {

constexpr sg::BatchSpec batch{.global = 8, .micro = 2, .seq = 16};

// A plan with `scale` as the first loss scale.
sg::Plan plan_of(sg::DType type, double scale, const sg::LayoutSpec& layout = {},
                 sg::Scaling scaling = sg::Scaling::dynamic) {
  return {.layout    = layout,
          .precision = {.param = type, .loss_scale = {.scaling = scaling, .value = scale}},
          .optimizer = {.lr = 3e-3}};
}

using Run = sg::testing::ScaledHistory;
Run run_of(const sg::Model& model, const sg::Plan& plan, int steps, int threads = 2) {
  return sg::testing::train_scaled(model, plan, batch, steps, threads);
}

}  // namespace

TEST_CASE("a step whose gradients overflow changes no bit of weights and optimizer state, and training recovers",
          "[graphs][precision][loss_scale]") {
  const auto model = GENERATE(small_gpt2, small_llama)(0);
  const auto kind  = GENERATE(sg::OptimizerKind::adamw, sg::OptimizerKind::sgd);
  CAPTURE(model.kind, kind == sg::OptimizerKind::sgd);
  sg::Plan plan       = plan_of(sg::DType::f16, 0x1p24, {.dp = 2, .tp = 2, .pp = 2});
  plan.optimizer.kind = kind;
  sg::LoopbackWorld world(8);
  sg::Trainer trainer(model, plan, batch, world, {.threads = 2, .seed = 7});
  sg::set_fresh_weights(trainer.run(), 7);
  const auto tokens = tokens_for(batch, 0, model.vocab);
  int skipped       = 0;
  double first_loss = 0;
  while (true) {
    const auto before           = training_state(trainer.run());
    const sg::StepResult result = trainer.step(tokens);
    if (skipped == 0) first_loss = result.loss;
    CHECK(result.loss_scale == std::ldexp(1.0, 24 - skipped));
    CHECK(result.loss == first_loss);  // the weights have not changed
    const bool unchanged = training_state(trainer.run()) == before;
    CHECK(unchanged == result.skipped);
    CHECK(std::isfinite(result.grad_norm) == !result.skipped);
    if (!result.skipped || skipped > 30) break;
    ++skipped;
  }
  CHECK(skipped > 0);
  CHECK(skipped < 24);
  for (const sg::StepRank& rank : trainer.run().step().ranks) {
    CHECK(trainer.run().memory().span<std::int64_t>(rank.num_updates)[0] == 1);
    CHECK(trainer.run().memory().span<double>(rank.loss_scale)[0] == std::ldexp(1.0, 24 - skipped));
  }
  sg::StepResult last;
  for (int step = 0; step < 10; ++step) last = trainer.step(tokens);
  CHECK(last.loss < first_loss);
}

TEST_CASE("after skipped steps, training has the bits of a run that began at the reduced scale",
          "[graphs][precision][loss_scale]") {
  const auto model = small_gpt2();
  struct Good {
    History history;
    double first_scale = 0;
    int skipped        = 0;
  };
  const auto good_steps = [&](double scale) {
    sg::LoopbackWorld world(2);
    sg::Trainer trainer(model, plan_of(sg::DType::f16, scale, {.dp = 2}), batch, world, {.threads = 2, .seed = 7});
    Good good;
    while (good.history.loss.size() < 5 && good.skipped < 30) {
      const int next              = static_cast<int>(good.history.loss.size());
      const sg::StepResult result = trainer.step(tokens_for(batch, next, model.vocab));
      good.skipped += result.skipped;
      if (result.skipped) continue;
      if (next == 0) good.first_scale = *result.loss_scale;
      good.history.loss.push_back(result.loss);
      good.history.grad_norm.push_back(result.grad_norm);
    }
    return good;
  };
  const Good late = good_steps(0x1p24), early = good_steps(late.first_scale);
  CHECK(late.first_scale < 0x1p24);
  CHECK(early.skipped < late.skipped);
  CHECK((early.history == late.history));
}

TEST_CASE("a loss scale that is a power of two changes no bit of losses and norms in f32 and f64",
          "[graphs][precision][loss_scale]") {
  const auto type       = GENERATE(sg::DType::f32, sg::DType::f64);
  const auto scaling    = GENERATE(sg::Scaling::fixed, sg::Scaling::dynamic);
  sg::Plan plan         = plan_of(type, 65536, {.dp = 2, .pp = 2}, scaling);
  sg::Plan plain        = plan;
  plan.precision.reduce = plain.precision.reduce = type;
  plain.precision.loss_scale.scaling             = sg::Scaling::none;
  CHECK((train(small_gpt2(), plan, batch, 5) == train(small_gpt2(), plain, batch, 5)));
}

TEST_CASE("scales, skipped steps and losses have the same bits in every pipeline split, schedule and thread count",
          "[graphs][precision][loss_scale]") {
  const auto model   = GENERATE(small_gpt2, small_llama)(0);
  const sg::Plan one = plan_of(sg::DType::f16, 0x1p24, {.dp = 2, .tp = 2});
  const Run expected = run_of(model, one, 10, 1);
  CHECK(std::count(expected.skipped.begin(), expected.skipped.end(), true) > 2);
  CHECK_FALSE(expected.skipped.back());
  for (const char* schedule : {"gpipe", "1f1b", "zb-h2"}) {
    if (sg::testing::scale() > 1 && std::string(schedule) != "1f1b") continue;
    CAPTURE(model.kind, schedule);
    sg::Plan plan = plan_of(sg::DType::f16, 0x1p24, {.dp = 2, .tp = 2, .pp = 2});
    plan.pipeline = {.schedule = schedule};
    CHECK((run_of(model, plan, 10, 4) == expected));
  }
}

TEST_CASE("the scale doubles after `growth_steps` good steps of a training run", "[graphs][precision][loss_scale]") {
  sg::Plan plan                          = plan_of(sg::DType::f16, 1024);
  plan.precision.loss_scale.growth_steps = 3;
  const Run run                          = run_of(small_gpt2(), plan, 8);
  CHECK(run.scales == std::vector<double>{1024, 1024, 1024, 2048, 2048, 2048, 4096, 4096});
}

TEST_CASE("a fixed scale stays constant, and steps that overflow are skipped", "[graphs][precision][loss_scale]") {
  const Run run = run_of(small_gpt2(), plan_of(sg::DType::f16, 0x1p30, {}, sg::Scaling::fixed), 3);
  CHECK(run.scales == std::vector<double>(3, 0x1p30));
  CHECK(run.skipped == std::vector<bool>(3, true));
}

TEST_CASE("gradients are read without the loss scale", "[graphs][precision][loss_scale]") {
  const auto model     = small_gpt2();
  const auto gradients = [&](sg::Scaling scaling) {
    const sg::Plan plan = plan_of(sg::DType::f32, 4096, {.dp = 2}, scaling);
    sg::LoopbackWorld world(2);
    sg::Trainer trainer(model, plan, batch, world, {.threads = 2, .keep_gradients = true, .seed = 7});
    static_cast<void>(trainer.step(tokens_for(batch, 0, model.vocab)));
    std::vector<float> found(32);
    trainer.run().read_tensor(sg::StepRun::Which::gradient, "transformer.h.0.ln_1.weight", found);
    return found;
  };
  CHECK((gradients(sg::Scaling::fixed) == gradients(sg::Scaling::none)));
}

TEST_CASE("a step without loss scaling has no node or buffer for it", "[graphs][precision][loss_scale]") {
  const sg::StepGraph step = sg::training_step(small_gpt2(), {}, batch);
  CHECK(step.ranks[0].loss_scale == sg::Buffer{});
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) CHECK(step.graph.op(sg::Node{i}) != "update_loss_scale");
}
