#pragma once
#include <cstdint>
#include <optional>

#include "graphs/step/training_step.hpp"

namespace stepgraph {

struct DataParallelOptions {
  int devices                            = 0;   // ranks of the world; 0: all of them
  int global                             = 1;   // sequences of a batch; each device gets global / devices, in order
  int seq                                = 1;   // tokens of a sequence
  int micro                              = 0;   // sequences that a device computes at a time; 0: all that it gets
  std::optional<OptimizerPlan> optimizer = {};  // given: a step ends with an update of the root's weights
  PrecisionPlan precision                = {};  // f32 or bf16: results are floats
  Recompute recompute                    = Recompute::none;
  Reuse reuse                            = Reuse::tight;
  int threads                            = 0;  // 0: as many as the machine has cores
  std::uint64_t seed                     = 0;  // of dropout, and of fresh weights where none are set
};

// A step whose batch comes from one rank, the root, and whose results are there afterwards. Before the passes of the
// devices, the root's weights are broadcast and its batch is scattered; after them, logits are gathered in the order of
// the batch, and losses and gradients are summed up, each in the order of ranks, as plain data parallelism sums them.
// Other ranks keep no more than that takes: no optimizer, and no gradients after the step.
struct DataParallelStep {
  StepGraph step;
  Buffer tokens  = {};  // of the root, as all below: [global, seq], i32, persistent
  Buffer targets = {};  // likewise; not of a forward step
  Buffer logits  = {};  // [global, seq, vocab] in the type of weights, persistent
};
inline constexpr Rank data_parallel_root{0};

// Forward and backward: loss (StepRank::loss), logits, gradients (StepWeight::gradient). Or forward alone: logits.
// Throws Error(config) where the batch does not divide over the devices, and where training_step does.
[[nodiscard]] DataParallelStep data_parallel_step(const Model& model, const DataParallelOptions& options);
[[nodiscard]] DataParallelStep data_parallel_forward(const Model& model, const DataParallelOptions& options);

}  // namespace stepgraph
