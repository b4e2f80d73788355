#include "graphs/recompute.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>
#include <set>

#include "backends/loopback/world.hpp"
#include "engine/error.hpp"
#include "engine/memory_plan.hpp"
#include "engine/verify.hpp"
#include "graphs/gpt2.hpp"
#include "graphs/llama.hpp"
#include "graphs/trainer.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;

namespace {

constexpr sg::BatchSpec batch_of_4{.global = 4, .micro = 1, .seq = 16};
constexpr sg::OptimizerPlan clipping{.lr = 1e-2, .clip = 0.05};

sg::Model small_gpt2() { return sg::gpt2({.layers = 4, .width = 32, .heads = 4, .context = 16, .vocab = 64}); }
sg::Model small_llama() {
  return sg::llama({.layers = 4, .width = 32, .heads = 4, .kv_heads = 2, .context = 16, .vocab = 64, .tied = true});
}

std::vector<std::int32_t> tokens_for(const sg::BatchSpec& batch, int step, std::int64_t vocab) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(batch.global * batch.seq + 1));
  std::uint32_t state = 12345u + static_cast<std::uint32_t>(step) * 7919u;
  for (auto& token : tokens) {
    state = state * 1664525u + 1013904223u;
    token = static_cast<std::int32_t>((state >> 8) % static_cast<std::uint32_t>(vocab));
  }
  return tokens;
}

// Of every step: loss, norm, and the gradients of all weights on all ranks.
struct History {
  std::vector<double> loss, grad_norm;
  std::vector<float> gradients;
  friend bool operator==(const History&, const History&) = default;
};

History train(const sg::Model& model, const sg::Plan& plan, int steps) {
  sg::LoopbackWorld world(sg::Layout(plan.layout).num_ranks());
  sg::Trainer trainer(model, plan, batch_of_4, world, {.threads = 2, .keep_gradients = true});
  sg::set_fresh_weights(trainer.run(), 7);
  History history;
  for (int step = 0; step < steps; ++step) {
    const auto result = trainer.step(tokens_for(batch_of_4, step, model.vocab));
    history.loss.push_back(result.loss);
    history.grad_norm.push_back(result.grad_norm);
    for (const sg::StepRank& rank : trainer.run().step().ranks) {
      for (const sg::StepWeight& weight : rank.weights) {
        const auto values = trainer.run().memory().span<float>(weight.gradient);
        history.gradients.insert(history.gradients.end(), values.begin(), values.end());
      }
    }
  }
  return history;
}

std::vector<sg::Plan> plans() {
  std::vector<sg::Plan> out;
  for (const auto& layout : {sg::LayoutSpec{}, sg::LayoutSpec{.tp = 2}, sg::LayoutSpec{.pp = 2},
                             sg::LayoutSpec{.dp = 2, .tp = 2, .pp = 2}}) {
    for (const char* schedule : {"1f1b", "interleaved", "zb-h1"}) {
      const int chunks = schedule == std::string("interleaved") ? 2 : 1;
      out.push_back({.layout = layout, .pipeline = {.schedule = schedule, .chunks = chunks}, .optimizer = clipping});
    }
  }
  for (const auto algorithm :
       {sg::Algorithm::ring, sg::Algorithm::tree, sg::Algorithm::hierarchical, sg::Algorithm::adaptive}) {
    out.push_back(
        {.layout = {.dp = 2, .tp = 2, .pp = 2, .devices_per_node = 4}, .optimizer = clipping, .algorithm = algorithm});
  }
  return out;
}

}  // namespace

TEST_CASE("recomputation changes no bit of losses, norms and gradients", "[graphs][recompute]") {
  const auto model = GENERATE(small_gpt2, small_llama)();
  const auto all   = plans();
  for (std::size_t i = 0; i < all.size(); i += static_cast<std::size_t>(sg::testing::scale())) {
    sg::Plan plan = all[i];
    CAPTURE(model.kind, to_string(plan.layout), plan.pipeline.schedule, plan.algorithm);
    const History reference = train(model, plan, 2);
    for (const auto kind : {sg::Recompute::selective, sg::Recompute::full}) {
      CAPTURE(kind);
      plan.recompute = kind;
      CHECK(train(model, plan, 2) == reference);  // and the step was proved
    }
  }
}
