// A trainer that changes to and from asynchronous updates between steps.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::hash_weights;
using sg::testing::small_gpt2;

namespace {

constexpr sg::UpdatePlan asynchronous{.mode = sg::UpdateWhen::asynchronous, .max_staleness = 1};

std::vector<sg::Batch> batches_for(const sg::BatchSpec& batch, int first, int count) {
  std::vector<sg::Batch> made;
  for (int step = first; step < first + count; ++step) {
    const std::vector<std::int32_t> tokens = sg::testing::tokens_for(batch, step, 64);
    made.push_back({.inputs = {tokens.begin(), tokens.end() - 1}, .targets = {tokens.begin() + 1, tokens.end()}});
  }
  return made;
}

}  // namespace

TEST_CASE("one rank has the bits of a synchronous run, whenever its mode changes", "[graphs][asynchronous]") {
  const sg::BatchSpec batch{.global = 2, .micro = 1, .seq = 8};
  sg::Plan plan;
  plan.precision.param = GENERATE(sg::DType::f32, sg::DType::bf16, sg::DType::f16);
  sg::LoopbackWorld world(1);
  sg::Trainer plain(small_gpt2(), plan, batch, world, {.threads = 2, .seed = 7});
  sg::Trainer changed(small_gpt2(), plan, batch, world, {.threads = 2, .seed = 7, .window = 3});
  static_cast<void>(plain.steps(batches_for(batch, 0, 8)));
  static_cast<void>(changed.steps(batches_for(batch, 0, 2)));
  CHECK(changed.set_update_mode(asynchronous) == 0);
  CHECK(changed.window() == 3);
  static_cast<void>(changed.steps(batches_for(batch, 2, 4)));
  CHECK(changed.set_update_mode({}) == 0);
  CHECK(changed.window() == 1);
  static_cast<void>(changed.steps(batches_for(batch, 6, 2)));
  CHECK(hash_weights(changed.run()) == hash_weights(plain.run()));
  CHECK(changed.num_updates() == plain.num_updates());
}

TEST_CASE("weights and optimizer states of several ranks stay as they are when the mode changes",
          "[graphs][asynchronous]") {
  const sg::BatchSpec batch{.global = 3, .micro = 1, .seq = 8};
  sg::Plan plan{.layout = {.dp = 3}, .update = asynchronous};
  plan.precision.param = GENERATE(sg::DType::f32, sg::DType::bf16);
  sg::LoopbackWorld world(3);
  sg::Trainer trainer(small_gpt2(), plan, batch, world, {.threads = 2, .seed = 7, .window = 4});
  sg::Evaluator evaluator(trainer, batch);
  static_cast<void>(trainer.steps(batches_for(batch, 0, 5)));
  const std::uint64_t weights = hash_weights(trainer.run());
  const double loss           = evaluator.loss(batches_for(batch, 9, 1).front());
  const auto means            = [&] {  // of each weight, by rank
    std::vector<std::vector<std::vector<float>>> found;
    for (const sg::StepRank& rank : trainer.run().step().ranks) {
                 auto& all = found.emplace_back();
                 for (const sg::StepWeight& weight : rank.weights) {
                   auto& values = all.emplace_back(static_cast<std::size_t>(weight.first.size()));
                   if (!weight.first.empty()) trainer.run().memory().read(weight.first.buffer, std::span(values));
      }
    }
               return found;
  };
  const auto owned = means();
  trainer.set_update_mode({});
  CHECK(hash_weights(trainer.run()) == weights);
  CHECK(trainer.num_updates() == 15);
  CHECK(std::abs(evaluator.loss(batches_for(batch, 9, 1).front()) - loss) < 1e-6);
  const auto whole = means();
  for (std::size_t rank = 0; rank < 3; ++rank) {
    CHECK(whole[rank] == whole[0]);
    for (std::size_t i = 0; i < owned[rank].size(); ++i) {
      if (!owned[rank][i].empty()) CHECK(owned[rank][i] == whole[0][i]);
    }
  }
  static_cast<void>(trainer.steps(batches_for(batch, 5, 1)));
  const std::uint64_t later = hash_weights(trainer.run());
  trainer.set_update_mode(asynchronous);
  CHECK(hash_weights(trainer.run()) == later);
  for (const sg::StepResult& result : trainer.steps(batches_for(batch, 6, 4))) CHECK(result.staleness->largest <= 1);
}

TEST_CASE("a trainer that cannot be asynchronous goes on as before", "[graphs][asynchronous][refuses]") {
  const sg::BatchSpec batch{.global = 2, .micro = 1, .seq = 8};
  sg::LoopbackWorld world(2);
  sg::Trainer trainer(small_gpt2(), {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::zero1, .min_params = 50}},
                      batch, world, {.threads = 2, .seed = 7});
  static_cast<void>(trainer.steps(batches_for(batch, 0, 1)));
  const std::uint64_t weights = hash_weights(trainer.run());
  CHECK_THROWS_MATCHES(trainer.set_update_mode(asynchronous), sg::Error,
                       MessageMatches(ContainsSubstring("shard.strategy: zero1 with update.mode asynchronous")));
  CHECK(hash_weights(trainer.run()) == weights);
  static_cast<void>(trainer.steps(batches_for(batch, 1, 1)));
}
