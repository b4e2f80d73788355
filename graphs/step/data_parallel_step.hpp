#pragma once
#include <cstdint>
#include <optional>

#include "graphs/step/training_step.hpp"

namespace stepgraph {

struct DataParallelOptions {
  int devices = 0;  // ranks of the world; 0: all of them
  int global  = 1;  // sequences of a batch; each device has global / devices of them, in order
  int seq     = 1;  // tokens of a sequence
  int micro   = 0;  // sequences that a device computes at a time; 0: all of its sequences
  std::optional<OptimizerPlan> optimizer = {};  // given: a step ends with an update of the weights
  UpdatePlan update                      = {};  // with an optimizer: synchronous or stale
  PrecisionPlan precision                = {};  // f32 or bf16: results are floats
  Recompute recompute                    = Recompute::none;
  Reuse reuse                            = Reuse::tight;
  int threads                            = 0;  // 0: as many as the machine has cores
  std::uint64_t seed                     = 0;  // of dropout, and of fresh weights where none are set
};

// A data-parallel step with one rank, the root, that has batch and results. First the root broadcasts its weights and
// scatters its batch. After forward and backward on all devices, logits are gathered in the order of the batch, and
// losses and gradients are reduced to the root in rank order. Other ranks have no optimizer state, and no gradients
// after the step. With a delayed update each rank keeps its gradients of the last step, which the next one reduces.
struct DataParallelStep {
  StepGraph step;
  Buffer tokens  = {};  // on the root, as all buffers below: [global, seq], i32, persistent
  Buffer targets = {};  // the same; a forward step has none
  Buffer logits  = {};  // [global, seq, vocab] in the type of weights, persistent
};
inline constexpr Rank data_parallel_root{0};

// Forward and backward: loss (StepRank::loss), logits and gradients (StepWeight::gradient). Forward only: logits. Both
// throw Error(config) where the batch does not divide over the devices, and where training_step throws.
[[nodiscard]] DataParallelStep data_parallel_step(const Model& model, const DataParallelOptions& options);
[[nodiscard]] DataParallelStep data_parallel_forward(const Model& model, const DataParallelOptions& options);

}  // namespace stepgraph
