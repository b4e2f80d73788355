// Other uses of sharded steps: evaluation, reading tensors, other algorithms, and building one rank alone.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "backends/loopback/world.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::Shard;
using sg::testing::small_gpt2;
using sg::testing::small_llama;

namespace {

constexpr sg::BatchSpec batch{.global = 8, .micro = 2, .seq = 16};

sg::Plan plan_of(sg::LayoutSpec layout, sg::ShardPlan shard) {
  shard.min_params = 50;
  return {.layout = layout, .shard = shard};
}

}  // namespace

TEST_CASE("a sharded model evaluates to the same loss, and drops gathered weights after use", "[graphs][shard]") {
  const sg::Model model       = GENERATE(small_gpt2(), small_llama());
  const bool flat             = GENERATE(true, false);
  const sg::LayoutSpec layout = GENERATE(sg::LayoutSpec{.dp = 4}, sg::LayoutSpec{.dp = 2, .tp = 2, .pp = 2});
  const int kept              = GENERATE(0, 1, 2);
  static int seen             = 0;
  if (sg::testing::left_out(seen, 5)) return;
  CAPTURE(model.kind, flat, to_string(layout), kept);
  const auto loss = [&](const sg::Plan& plan) {
    sg::LoopbackWorld world(layout);
    sg::Evaluator evaluator(model, plan, batch, world, {.threads = 2});
    sg::set_fresh_weights(evaluator.run(), 3);
    return evaluator.loss(sg::testing::tokens_for(batch, 0, model.vocab));
  };
  const sg::Plan plan = plan_of(layout, {.strategy = Shard::full, .flat = flat});
  CHECK(loss(plan) == loss({.layout = layout}));
  // Settings that keep weights during training do not change a forward step.
  sg::Plan keeping = plan;
  if (kept == 0) keeping.shard.keep_between_microbatches = true;
  if (kept == 1) keeping.shard.reshard_after_forward = false;
  if (kept == 2) keeping.shard.reshard_group = 2;
  CHECK(loss(keeping) == loss(plan));
  CHECK(sg::forward_step(model, keeping, batch).graph == sg::forward_step(model, plan, batch).graph);
}

TEST_CASE("tensors of a sharded run are read whole, with the same values as without sharding", "[graphs][shard]") {
  const sg::Model model = GENERATE(small_gpt2(), small_llama());
  const Shard strategy  = GENERATE(Shard::zero1, Shard::grad_op, Shard::full);
  const bool flat = GENERATE(true, false), half = GENERATE(false, true);
  const sg::LayoutSpec layout = GENERATE(sg::LayoutSpec{.dp = 4}, sg::LayoutSpec{.dp = 2, .tp = 2, .pp = 2});
  if (sg::testing::scale() > 1 && (half || layout.dp == 4)) return;
  static int seen = 0;
  if (sg::testing::left_out(seen, 5)) return;
  CAPTURE(model.kind, to_string(strategy), flat, half, to_string(layout));
  const auto tensors = [&](sg::Plan plan) {
    if (half) plan.precision = {.param = sg::DType::bf16, .reduce = sg::DType::bf16};
    sg::LoopbackWorld world(layout);
    sg::Trainer trainer(model, plan, batch, world, {.threads = 2, .keep_gradients = true, .seed = 5});
    std::vector<std::vector<float>> found;
    for (int step = 0; step < 2; ++step) {
      const auto result = trainer.step(sg::testing::tokens_for(batch, step, model.vocab));
      found.push_back({static_cast<float>(result.loss), static_cast<float>(result.grad_norm)});
    }
    const sg::ParameterInventory inventory = model.parameters();
    for (const sg::Parameter& parameter : inventory.parameters()) {
      for (const auto which : {sg::StepRun::Which::value, sg::StepRun::Which::gradient}) {
        found.emplace_back(static_cast<std::size_t>(parameter.num_elements()));
        trainer.run().read_tensor(which, parameter.name, std::span<float>(found.back()));
      }
    }
    return found;
  };
  CHECK(tensors(plan_of(layout, {.strategy = strategy, .flat = flat})) == tensors({.layout = layout}));
}

TEST_CASE("a sharded step built for one rank is the slice of the whole step", "[graphs][shard]") {
  const Shard strategy = GENERATE(Shard::zero1, Shard::grad_op, Shard::full, Shard::hybrid);
  const auto reduce    = GENERATE(sg::ReduceWhen::last, sg::ReduceWhen::each);
  const bool flat      = GENERATE(true, false);
  if (strategy == Shard::zero1 && reduce == sg::ReduceWhen::each) return;
  sg::Plan plan =
      plan_of({.dp = 4, .tp = 2, .pp = 2},
              {.strategy = strategy, .reduce = reduce, .flat = flat, .group = strategy == Shard::hybrid ? 2 : 0});
  CAPTURE(to_string(strategy), to_string(reduce), flat);
  const sg::StepGraph whole = sg::training_step(small_llama(), plan, batch);
  sg::verify(whole);
  for (const int rank : {0, 5, 15}) {
    const sg::StepGraph alone = sg::training_step(small_llama(), plan, batch, {.only = sg::Rank{rank}});
    CHECK(sg::slice(whole.graph, sg::Rank{rank}) == alone.graph);
  }
}

TEST_CASE("sharded steps run on rings and trees", "[graphs][shard]") {
  const auto algorithm = GENERATE(sg::Algorithm::ring, sg::Algorithm::tree, sg::Algorithm::hierarchical);
  const Shard strategy = GENERATE(Shard::zero1, Shard::full);
  const bool flat      = GENERATE(true, false);
  static int seen      = 0;
  if (sg::testing::left_out(seen, 5)) return;
  CAPTURE(to_string(algorithm), to_string(strategy), flat);
  sg::Plan plan     = plan_of({.dp = 4, .devices_per_node = 2}, {.strategy = strategy, .flat = flat});
  const auto direct = sg::testing::train(small_gpt2(), plan, batch, 3);
  plan.algorithm    = algorithm;
  const auto got    = sg::testing::train(small_gpt2(), plan, batch, 3);
  CHECK(sg::testing::loss_distance(got, direct) < 1e-6);
  CHECK(sg::testing::norm_distance(got, direct) < 1e-5);
}

TEST_CASE("summed gradients are dp times the averaged ones", "[graphs][shard]") {
  const Shard strategy = GENERATE(Shard::none, Shard::full);
  sg::Plan plan        = plan_of({.dp = 2}, {.strategy = strategy});
  plan.optimizer.clip  = 0;
  const auto average   = sg::testing::train(small_gpt2(), plan, batch, 1);
  plan.shard.reduction = sg::Reduction::sum;
  const auto sum       = sg::testing::train(small_gpt2(), plan, batch, 1);
  CHECK(sum.loss == average.loss);
  CHECK(sum.grad_norm[0] == 2 * average.grad_norm[0]);
}
