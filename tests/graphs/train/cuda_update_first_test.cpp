// Steps on a GPU that begin with the update of the step before them, captured or not.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "graphs/train/trainer.hpp"
#include "tests/support/device_case.hpp"
#include "tests/support/short_training.hpp"

namespace sg = stepgraph;
using sg::testing::tokens_for;

namespace {

struct Seen {
  std::vector<double> losses, norms;
  std::uint64_t weights                            = 0;
  friend bool operator==(const Seen&, const Seen&) = default;
};

Seen train(const sg::Plan& plan, bool capture, bool update_first) {
  const sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 16};
  const sg::Model model = sg::testing::small_gpt2();
  const auto world      = sg::testing::device_world(sg::Layout(plan.layout).num_ranks(), capture);
  sg::Trainer trainer(model, plan, batch, *world, {.threads = 2, .seed = 7, .update_first = update_first});
  sg::Evaluator evaluator(trainer, batch);
  Seen seen;
  for (int step = 0; step < 6; ++step) {
    const sg::StepResult result = trainer.step(tokens_for(batch, step, model.vocab));
    seen.losses.push_back(result.loss);
    seen.norms.push_back(result.grad_norm);
    if (step == 3) seen.losses.push_back(evaluator.loss(tokens_for(batch, 9, model.vocab)));
  }
  seen.weights = sg::testing::hash_weights(trainer.run());
  return seen;
}

}  // namespace

TEST_CASE("on a GPU a step that begins with the update before it has the same bits", "[graphs][cuda][update_first]") {
  sg::testing::need_device();
  const bool capture  = GENERATE(false, true);
  const auto type     = GENERATE(sg::DType::f32, sg::DType::bf16);
  const auto strategy = GENERATE(sg::Shard::none, sg::Shard::zero1, sg::Shard::full);
  CAPTURE(capture, type, to_string(strategy));
  const sg::Plan plan{
      .layout = {.dp = 2}, .shard = {.strategy = strategy, .min_params = 50}, .precision = {.param = type}};
  CHECK(train(plan, capture, true) == train(plan, capture, false));
}
