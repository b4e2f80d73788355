#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/plan/memory_plan.hpp"
#include "graphs/collectives/algorithms.hpp"
#include "graphs/layout/layout.hpp"
#include "graphs/plan/offload_plan.hpp"
#include "graphs/plan/precision.hpp"
#include "graphs/plan/rate_schedule.hpp"
#include "graphs/plan/recompute.hpp"
#include "graphs/plan/shard_plan.hpp"
#include "graphs/plan/update_plan.hpp"
#include "graphs/schedule/schedule.hpp"

// The plan of a step, as data: the sections of a config that do not describe model, data or run.
namespace stepgraph {

struct PipelinePlan {
  std::string schedule   = "1f1b";  // a kind, the path of a .csv file, or "auto": searched for (with_split)
  int chunks             = 1;       // stages of each rank; kinds in V placement have 2, also where 1 is given
  std::vector<int> split = {};      // layers of each stage; empty: equally
  bool balanced          = false;   // instead of `split`: so that the slowest stage is as fast as possible
  // For searched schedules: the most activations of a rank, in microbatches of one rank, or in bytes. 0: no limit.
  double limit                                                     = 0;
  std::int64_t limit_bytes                                         = 0;
  std::shared_ptr<const PipelineSchedule> found                    = {};  // with `auto`: the result of the search
  friend bool operator==(const PipelinePlan&, const PipelinePlan&) = default;
};

enum class OptimizerKind : std::uint8_t { adamw, sgd };
[[nodiscard]] std::string_view to_string(OptimizerKind kind) noexcept;

// Tensors with a learning rate or weight decay of their own. The first group whose pattern matches the name of a tensor
// applies to it.
struct OptimizerGroup {
  std::string match                  = {};  // of the whole name: * is any text, ? any character; "*.bias"
  std::optional<double> lr           = {};  // none: the optimizer's. The schedule applies to both
  std::optional<double> weight_decay = {};  // none: the optimizer's; else of tensors with any number of dims
  friend bool operator==(const OptimizerGroup&, const OptimizerGroup&) = default;
};
// The number of the group that applies to a tensor, from 1; 0: none.
[[nodiscard]] int group_of(const std::vector<OptimizerGroup>& groups, std::string_view tensor) noexcept;

struct OptimizerPlan {
  OptimizerKind kind                 = OptimizerKind::adamw;
  double lr                          = 1e-3;
  double beta1                       = 0.9;  // adamw
  double beta2                       = 0.95;
  double eps                         = 1e-8;
  double momentum                    = 0.9;  // sgd
  double weight_decay                = 0.1;  // of parameters with two or more dims
  double clip                        = 1.0;  // the largest norm of all gradients together; 0: no clipping
  RateSchedule schedule              = {};   // of the rates of all groups
  std::vector<OptimizerGroup> groups = {};
  friend bool operator==(const OptimizerPlan&, const OptimizerPlan&) = default;
};

// The rates of the optimizer and of its groups, where the optimizer's is `rate`: groups keep their ratio to it.
[[nodiscard]] std::vector<double> rates_of(const OptimizerPlan& optimizer, double rate);

struct Plan {
  LayoutSpec layout               = {};
  PipelinePlan pipeline           = {};
  ShardPlan shard                 = {};
  OffloadPlan offload             = {};
  PrecisionPlan precision         = {};
  OptimizerPlan optimizer         = {};
  UpdatePlan update               = {};
  Recompute recompute             = Recompute::none;
  Algorithm algorithm             = Algorithm::direct;  // of collectives
  Reuse reuse                     = Reuse::tight;       // of memory
  std::int64_t memory_limit_bytes = 0;                  // of each rank; a step that needs more is an error; 0: no limit
  friend bool operator==(const Plan&, const Plan&) = default;
};

// The batch of one step, in sequences. A data-parallel rank has global / dp sequences, in microbatches of `micro`.
struct BatchSpec {
  int global                                                 = 1;
  int micro                                                  = 1;
  int seq                                                    = 1;  // tokens of a sequence
  friend bool operator==(const BatchSpec&, const BatchSpec&) = default;
};

}  // namespace stepgraph
