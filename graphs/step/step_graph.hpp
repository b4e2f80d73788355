#pragma once
#include <optional>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/simulate/machine.hpp"
#include "graphs/layout/layout.hpp"
#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/schedule/schedule.hpp"
#include "graphs/step/memory_role.hpp"

namespace stepgraph {

// Elements [begin, end) of a rank's weight, stored from element `offset` of a buffer on: all of the weight, or the
// rank's shard of it. An empty shard has no buffer.
struct StoredRange {
  Buffer buffer       = {};
  std::int64_t begin  = 0;
  std::int64_t end    = 0;
  std::int64_t offset = 0;
  bool sharded        = false;  // the data-parallel ranks of a shard group store different elements
  [[nodiscard]] std::int64_t size() const noexcept { return end - begin; }
  [[nodiscard]] bool empty() const noexcept { return begin == end; }
};

// A weight as one rank of a step holds it.
struct StepWeight {
  std::size_t block    = 0;  // which of the model's, and which weight of that: StepGraph::spec
  std::size_t number   = 0;
  Stage stage          = {};
  StoredRange value    = {};     // persistent
  StoredRange gradient = {};     // of this step: summed over microbatches and data-parallel ranks once the step has run
  StoredRange first    = {};     // the optimizer's: running mean of gradients, or velocity; persistent
  StoredRange second   = {};     // running mean of their squares (AdamW)
  StoredRange master   = {};     // what is updated, where the value is a rounded copy of it (bf16, f16); persistent
  bool tied            = false;  // the value is another weight's: that of this rank, or a copy of another rank's
};

// What one rank of a step has that is read or written from outside, between runs. Buffers it does not have are of no
// graph.
struct StepRank {
  Coord coord                 = {};
  std::vector<Buffer> tokens  = {};  // by microbatch, i32, persistent: ranks of the first stage
  std::vector<Buffer> targets = {};  // ranks of the last stage
  std::vector<Buffer> logits  = {};  // by microbatch, of a step that was asked for them
  Buffer loss                 = {};  // f64: the mean over all tokens; ranks of the last stage
  Buffer grad_norm            = {};  // f64
  Buffer step_number          = {};  // i64, from 1: to be set before each run
  Buffer rate                 = {};  // f64: learning rate
  // Of a step whose loss is scaled. The scale is to be set before the first run, as StepRun does; the others begin as
  // 0.
  Buffer loss_scale               = {};  // f64: this run's before it, the next one's after it
  Buffer num_updates              = {};  // i64: steps that were not skipped
  Buffer good_steps               = {};  // i64: of those, since the scale last changed
  Buffer skipped                  = {};  // i64: whether the last run was
  std::vector<StepWeight> weights = {};
  // Of weights, and of their gradients, in a step.
  int num_all_gathers     = 0;
  int num_reduce_scatters = 0;
  int num_all_reduces     = 0;
};

// A step as a graph, and where its inputs and results are. Stands for its graph wherever one is wanted: verify(step),
// write_dot(step, ...), simulate(step, machine).
struct StepGraph {
  Graph graph;
  Layout layout;
  Model model;
  BatchSpec batch;
  DType type                      = DType::f32;
  PrecisionPlan precision         = {};  // of which `type` is the param
  int num_microbatches            = 1;   // of each data-parallel rank
  int shard_size                  = 1;   // data-parallel ranks, neighbours, that keep one whole between them
  PipelineSchedule schedule       = {};  // as lowered: with transfers
  std::vector<StepRank> ranks     = {};
  std::vector<std::string> unused = {};  // weights that no op reads, where the plan lets them be
  std::vector<MemoryRole> roles   = {};  // by buffer

  // What a buffer is there for; what a pass of one's own has added is `other`.
  [[nodiscard]] MemoryRole role(Buffer buffer) const {
    return buffer.id < roles.size() ? roles[buffer.id] : MemoryRole::other;
  }
  [[nodiscard]] const WeightSpec& spec(const StepWeight& weight) const {
    return model.blocks[weight.block].weights[weight.number];
  }
  [[nodiscard]] DType value_type(const WeightSpec& weight) const noexcept {
    return weight.norm ? precision.norm_type() : type;
  }
  operator const Graph&() const { return graph; }  // NOLINT: implicit on purpose
};

struct StepOptions {
  bool keep_gradients      = false;  // gradients are persistent: to be read after a run
  std::uint64_t seed       = 0;      // of what is random in a step: dropout
  std::optional<Rank> only = {};     // build the slice of one rank alone
  // The norm's squares of a weight that all data-parallel ranks have are summed by one of them: by another for each
  // weight, or each rank sums all by itself.
  bool share_norm = true;
  // Where Algorithm::adaptive tries its candidates; none: nodes of `devices_per_node` ranks with 100 GB/s inside and 25
  // GB/s between them, at 2 and 5 microseconds.
  const Machine* machine = nullptr;
};

// What a forward step computes: the mean loss, or the logits of every token.
enum class ForwardResult : std::uint8_t { loss, logits };

}  // namespace stepgraph
