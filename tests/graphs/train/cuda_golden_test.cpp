// The golden models on a GPU: the same verified and planned graphs as on the CPU, on streams.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>

#include "backends/loopback/world.hpp"
#include "graphs/train/broadcast_weights.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/golden.hpp"

namespace sg = stepgraph;
using sg::testing::golden;

namespace {

struct Case {
  int dp, tp, pp;
  sg::Shard strategy;
};

sg::Plan plan_of(const Case& test) {
  return {.layout = {.dp = test.dp, .tp = test.tp, .pp = test.pp},
          .shard  = {.strategy = test.strategy, .min_params = 100}};
}

void check_layouts(const std::string& model) {
  using enum sg::Shard;
  const Case test = GENERATE(Case{1, 1, 1, none}, Case{2, 1, 1, none}, Case{1, 2, 1, none}, Case{1, 1, 2, none},
                             Case{2, 2, 2, none}, Case{2, 1, 1, full}, Case{2, 2, 2, full}, Case{2, 1, 1, zero1});
  const int ranks = test.dp * test.tp * test.pp;
  // Under compute-sanitizer, tests only one rank, two data-parallel ranks, and all kinds of parallelism together.
  if (sg::testing::sanitized() && (ranks == 8 ? test.strategy != full : test.strategy != none || test.dp < ranks))
    return;
  CAPTURE(model, test.dp, test.tp, test.pp, to_string(test.strategy));
  const auto world = sg::testing::device_world(ranks);
  const int steps  = std::max(3, sg::testing::cases(20));
  sg::testing::check_golden_bounds(golden(model), sg::testing::train(golden(model), plan_of(test), 2, steps, *world),
                                   steps);
}

void check_captured(const std::string& model) {
  const Case test{2, 2, 2, sg::Shard::full};
  const int steps  = std::max(3, sg::testing::cases(5));
  const auto train = [&](bool capture, const std::vector<int>& devices) {
    const auto world = sg::testing::device_world(8, capture, devices);
    return sg::testing::train(golden(model), plan_of(test), 1, steps, *world);
  };
  const auto captured = train(true, {0});
  for (const auto& other : {train(false, {0}), train(true, {0, 0}), train(false, {0, 0, 0})}) {
    CHECK(captured.loss == other.loss);
    CHECK(captured.grad_norm == other.grad_norm);
    CHECK(captured.gradients == other.gradients);
  }
}

}  // namespace

TEST_CASE("a GPU trains GPT-2 as transformers does, in every layout", "[graphs][cuda][golden]") {
  check_layouts("gpt2-tiny");
}
TEST_CASE("a GPU trains Llama as transformers does, in every layout", "[graphs][cuda][golden]") {
  check_layouts("llama-tiny");
}

TEST_CASE("two logical devices train GPT-2 as transformers does", "[graphs][cuda][golden]") {
  using enum sg::Shard;
  const Case test = GENERATE(Case{2, 1, 1, full}, Case{1, 2, 1, none}, Case{1, 1, 2, none}, Case{2, 2, 2, full});
  if (sg::testing::sanitized() && test.tp * test.pp > 1) return;
  CAPTURE(test.dp, test.tp, test.pp);
  const auto world = sg::testing::device_world(test.dp * test.tp * test.pp, true, {0, 0});
  const int steps  = std::max(3, sg::testing::cases(20));
  sg::testing::check_golden_bounds(golden("gpt2-tiny"),
                                   sg::testing::train(golden("gpt2-tiny"), plan_of(test), 2, steps, *world), steps);
}

TEST_CASE("weights are broadcast and compared on a GPU", "[graphs][cuda]") {
  const auto world = sg::testing::device_world(2);
  sg::Trainer trainer(golden("gpt2-tiny").model, {.layout = {.dp = 2}}, {.global = 2, .micro = 1, .seq = 8}, *world);
  sg::set_fresh_weights(trainer.run(), 3);
  const std::uint64_t hash = sg::broadcast_weights(trainer.run());
  CHECK(sg::check_weights(trainer.run()) == hash);
}

TEST_CASE("validation on the trainer's weights, groups and ignored targets on a GPU are those of the CPU",
          "[graphs][cuda]") {
  using enum sg::Shard;
  const Case test                = GENERATE(Case{1, 1, 1, none}, Case{2, 1, 2, full}, Case{2, 2, 1, zero1});
  const sg::testing::Golden gold = golden("llama-tiny");
  sg::Plan plan                  = plan_of(test);
  plan.optimizer.schedule        = {.kind = sg::RateKind::linear, .warmup = 1, .steps = 6};
  plan.optimizer.groups          = {{.match = "*.q_proj.*", .lr = 1e-4}, {.match = "*norm*", .weight_decay = 0.5}};
  const sg::BatchSpec batch{.global = gold.batch.global, .micro = 2, .seq = gold.batch.seq};
  const auto losses = [&](sg::World& world) {
    sg::Trainer trainer(gold.model, plan, batch, world, {.threads = 2, .seed = 5});
    sg::Evaluator evaluator(trainer, batch);
    std::vector<double> found;
    for (int step = 0; step < 4; ++step) {
      const auto tokens = gold.tokens_of(step);
      sg::Batch of{.inputs = {tokens.begin(), tokens.end() - 1}, .targets = {tokens.begin() + 1, tokens.end()}};
      for (std::size_t i = 0; i < of.targets.size(); i += 3) of.targets[i] = -1;
      found.push_back(evaluator.loss(gold.tokens_of(9)));
      found.push_back(trainer.step(of).loss);
    }
    return found;
  };
  const auto world = sg::testing::device_world(test.dp * test.tp * test.pp);
  sg::LoopbackWorld loopback(test.dp * test.tp * test.pp);
  const std::vector<double> found = losses(*world), expected = losses(loopback);
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(std::abs(found[i] - expected[i]) < 1e-5 * expected[i]);
}

TEST_CASE("a GPU trains GPT-2 to the same bits with and without capture, on one and several logical devices",
          "[graphs][cuda]") {
  check_captured("gpt2-tiny");
}
TEST_CASE("a GPU trains Llama to the same bits with and without capture, on one and several logical devices",
          "[graphs][cuda]") {
  check_captured("llama-tiny");
}
