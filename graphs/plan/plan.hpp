#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/plan/memory_plan.hpp"
#include "graphs/collectives/algorithms.hpp"
#include "graphs/layout/layout.hpp"
#include "graphs/plan/precision.hpp"
#include "graphs/plan/recompute.hpp"
#include "graphs/plan/shard_plan.hpp"

// How a step is to be done, as data: the parts of a config that say nothing of model, data or run.
namespace stepgraph {

struct PipelinePlan {
  std::string schedule                                             = "1f1b";  // a kind, or a CSV file of one's own
  int chunks                                                       = 1;       // stages of each rank
  friend bool operator==(const PipelinePlan&, const PipelinePlan&) = default;
};

enum class OptimizerKind : std::uint8_t { adamw, sgd };
[[nodiscard]] std::string_view to_string(OptimizerKind kind) noexcept;

struct OptimizerPlan {
  OptimizerKind kind  = OptimizerKind::adamw;
  double lr           = 1e-3;
  double beta1        = 0.9;  // adamw
  double beta2        = 0.95;
  double eps          = 1e-8;
  double momentum     = 0.9;  // sgd
  double weight_decay = 0.1;  // of parameters with two or more dims
  double clip         = 1.0;  // the largest norm of all gradients together; 0: no clipping
  friend bool operator==(const OptimizerPlan&, const OptimizerPlan&) = default;
};

struct Plan {
  LayoutSpec layout                                = {};
  PipelinePlan pipeline                            = {};
  ShardPlan shard                                  = {};
  PrecisionPlan precision                          = {};
  OptimizerPlan optimizer                          = {};
  Recompute recompute                              = Recompute::none;
  Algorithm algorithm                              = Algorithm::direct;  // of collectives
  Reuse reuse                                      = Reuse::tight;       // of memory
  std::int64_t memory_limit_bytes                  = 0;  // a step of which a rank needs more is refused; 0: no limit
  friend bool operator==(const Plan&, const Plan&) = default;
};

// Sequences of one step. A data-parallel rank has global / dp of them, in microbatches of `micro`.
struct BatchSpec {
  int global                                                 = 1;
  int micro                                                  = 1;
  int seq                                                    = 1;  // tokens of a sequence
  friend bool operator==(const BatchSpec&, const BatchSpec&) = default;
};

}  // namespace stepgraph
