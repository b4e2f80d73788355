#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "graphs/train/trainer.hpp"

// Training that applies the gradients of step s - k at the end of step s.
namespace stepgraph::testing {

// Norms that are not numbers are -1, so that runs can be compared.
struct DelayedRun {
  std::vector<double> loss, grad_norm, scale;
  std::vector<std::int64_t> updates;                   // done after each step
  std::map<std::string, std::vector<double>> weights;  // after the last step, by tensor
  friend bool operator==(const DelayedRun&, const DelayedRun&) = default;
};

using TokensOfStep = std::function<std::vector<std::int32_t>(int step)>;
using StartWeights = std::function<void(StepRun& run)>;

// What a trainer does, synchronous or with a delayed update: each norm is that of its own step.
[[nodiscard]] DelayedRun run_trainer(Trainer& trainer, int first, int steps, const TokensOfStep& tokens);

// A plain sequential program with synchronous pieces only: a step that changes no weight gives loss, norm and reduced
// gradients; a queue of whole gradients; AdamW on whole tensors. `plan.update` says by how many steps updates are late.
[[nodiscard]] DelayedRun delayed_reference(const Model& model, const Plan& plan, const BatchSpec& batch, int steps,
                                           const TokensOfStep& tokens, const StartWeights& start,
                                           std::uint64_t seed = 7);

}  // namespace stepgraph::testing
