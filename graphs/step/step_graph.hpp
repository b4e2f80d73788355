#pragma once
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/graph/issue_order.hpp"
#include "engine/graph/ordered_graph.hpp"
#include "engine/plan/workspaces.hpp"
#include "engine/simulate/machine.hpp"
#include "graphs/layout/layout.hpp"
#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/schedule/schedule.hpp"
#include "graphs/step/memory_role.hpp"
#include "graphs/step/offload/homes.hpp"

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
  std::size_t block  = 0;  // index into Model::blocks, and into Block::weights: StepGraph::spec
  std::size_t number = 0;
  Stage stage        = {};
  StoredRange value  = {};  // persistent
  // Of this step: summed over microbatches and data-parallel ranks once the step has run. With a delayed update: of the
  // step before it, while the step runs.
  StoredRange gradient = {};
  StoredRange first    = {};  // optimizer state: running mean of gradients (AdamW), or velocity (SGD); persistent
  StoredRange second   = {};  // running mean of squared gradients (AdamW); persistent
  StoredRange master = {};  // with bf16 and f16: the optimizer's copy in f32, of which the value is rounded; persistent
  bool tied          = false;  // shares the value of another weight: on this rank, or as a copy of another rank's
};

// The gradients of one step as a rank keeps them until they are applied (UpdatePlan::delays).
struct GradientSet {
  std::vector<Buffer> gradients = {};  // persistent
  // f64: the loss scale of the gradients, 1 without loss scaling. NaN: the set is empty.
  Buffer scale = {};
  // f64, persistent, of sets from 2 steps on: the clip factor. NaN: the set is empty or its norm is not finite.
  Buffer factor = {};
};

// The buffers of one rank that callers read or write between runs. A buffer that the rank does not have is Buffer{}.
struct StepRank {
  Coord coord                 = {};
  std::vector<Buffer> tokens  = {};  // by microbatch, i32, persistent: ranks of the first stage
  std::vector<Buffer> targets = {};  // ranks of the last stage
  std::vector<Buffer> logits  = {};  // by microbatch, of a step that was asked for them
  Buffer loss                 = {};  // f64: the mean over all targets that count; ranks of the last stage
  Buffer grad_norm            = {};  // f64: of this step; with a delayed update of the step before (NaN: none)
  Buffer step_number          = {};  // i64, from 1: to be set before each run
  Buffer rate                 = {};  // f64: learning rates of the optimizer, then of each of its groups
  Buffer num_ignored          = {};  // i64: targets of all ranks that are -1 and do not count; beside `loss`
  // i64: updates that were not skipped. With loss scaling and with a delayed update the step counts them, from 0. Else
  // the number of the update (from 1) is to be set before each run. AdamW reads it.
  Buffer num_updates = {};
  // f64, persistent with StepOptions::update_first: the clip factor of the last run, with which the next run updates.
  // NaN: nothing is left to update. It is to be set to NaN before the first run, as StepRun does. `rate` and
  // `num_updates` then belong to the last run, too: they are to be set after each run.
  Buffer factor = {};
  // For loss scaling. The scale is set before the first run, as StepRun does; the others begin as 0.
  Buffer loss_scale = {};  // f64: before a run: of this run; after it: of the next
  Buffer good_steps = {};  // i64: updates since the scale last changed
  Buffer skipped    = {};  // i64: 1 where the gradients that grad_norm is of overflowed
  // With a delayed update: sets of gradients by age in steps, from 0. Set 0 has no gradients, only a scale; without
  // loss scaling it is to be set to 1. All other scales and factors begin as NaN. StepRun does both.
  std::vector<GradientSet> sets = {};
  // In an asynchronous window. i64: the version that the step has read, and its staleness.
  Buffer taken              = {};
  Buffer num_ignored_of_all = {};  // i64: to be set before each run; `num_ignored` is there that of the rank itself
  // i64: the version that the rank's gradient has made, or -1: it was dropped.
  Buffer given                    = {};
  std::vector<StepWeight> weights = {};
  // Collectives of weights and gradients in a step.
  int num_all_gathers     = 0;
  int num_reduce_scatters = 0;
  int num_all_reduces     = 0;
};

// The ranks that a step holds: all of its layout, or those of a slice (StepOptions::only).
class StepRanks {
 public:
  StepRanks() = default;
  StepRanks(const Layout& layout, RankSet ranks);

  [[nodiscard]] const RankSet& ranks() const noexcept { return ranks_; }
  [[nodiscard]] StepRank& at(Rank rank);  // throws Error(config) for a rank that the step does not hold
  [[nodiscard]] const StepRank& at(Rank rank) const;
  [[nodiscard]] const StepRank* find(Rank rank) const noexcept;  // null: not held

  // In the order of ranks, by place. In a whole step the place is the rank.
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] StepRank& operator[](std::size_t place) { return entries_[place]; }
  [[nodiscard]] const StepRank& operator[](std::size_t place) const { return entries_[place]; }
  [[nodiscard]] const StepRank& front() const { return entries_.front(); }
  [[nodiscard]] auto begin() noexcept { return entries_.begin(); }
  [[nodiscard]] auto end() noexcept { return entries_.end(); }
  [[nodiscard]] auto begin() const noexcept { return entries_.begin(); }
  [[nodiscard]] auto end() const noexcept { return entries_.end(); }

 private:
  RankSet ranks_ = RankSet::all(1);
  std::vector<StepRank> entries_;
};

// A step as a graph, with the buffers of its inputs and results. Converts to its graph: verify(step), write_dot(step,
// ...), simulate(step, machine).
struct StepGraph {
  Graph graph;
  Layout layout;
  Model model;
  BatchSpec batch;
  DType type                = DType::f32;
  PrecisionPlan precision   = {};  // `type` is its param
  OptimizerKind optimizer   = OptimizerKind::adamw;
  int num_microbatches      = 1;      // of each data-parallel rank
  int shard_size            = 1;      // data-parallel ranks of a shard group
  bool update_first         = false;  // StepOptions::update_first
  UpdatePlan update         = {};
  PipelineSchedule schedule = {};  // lowered: with transfers
  std::vector<int> layers   = {};  // of each stage
  StepRanks ranks           = {};
  // Of an asynchronous window: the ranks by step. `loss_scale` is there that of the step; it is set by the window, as
  // `taken` and `given` are. `ranks` has the buffers of the first step, and those that last: the number of updates, the
  // loss scale of the next window and its count. These are read from rank 0, and set on all ranks.
  std::vector<StepRanks> window   = {};
  std::vector<std::string> unused = {};  // weights that no op reads, where the plan allows them
  std::vector<MemoryRole> roles   = {};  // by buffer
  std::vector<HomeFormat> homes   = {};  // of buffers that are offloaded
  OffloadSummary offload          = {};

  // The purpose of a buffer; `other` for buffers that a user's pass has added.
  [[nodiscard]] MemoryRole role(Buffer buffer) const {
    return buffer.id < roles.size() ? roles[buffer.id] : MemoryRole::other;
  }
  [[nodiscard]] const WeightSpec& spec(const StepWeight& weight) const {
    return model.blocks[weight.block].weights[weight.number];
  }
  [[nodiscard]] DType value_type(const WeightSpec& weight) const noexcept {
    return weight.norm ? precision.norm_type() : type;
  }
  // The layers of one rank, or of all ranks that the step holds. None: they are as Plan::recompute and OffloadPlan say.
  [[nodiscard]] std::optional<ActivationCounts> activations(std::optional<Rank> rank = {}) const;
  // The format of a buffer that is a home; null: its elements are as they are.
  [[nodiscard]] const HomeFormat* home(Buffer buffer) const;
  // The type of the elements that a buffer stands for, wherever they lie.
  [[nodiscard]] DType element_type(Buffer buffer) const;
  operator const Graph&() const { return graph; }  // NOLINT: implicit on purpose
  operator OrderedGraph() const { return graph; }  // NOLINT: likewise
};

// The phase of nodes that make each set of gradients one step older, at the end of a step with a delayed update.
inline constexpr std::string_view shift_phase = "shift";
// The phase of all nodes that update weights, of the copies that they need, and of the collectives that follow them.
inline constexpr std::string_view update_phase = "update";

struct StepOptions {
  bool keep_gradients = false;  // gradients are persistent and can be read after a run; not with a delayed update
  // The step begins with the update of the step before it: each weight is updated before its first use, beside the
  // forward pass of weights before it. Gradients and the clip factor are persistent. updates_of(step) is the update
  // that is left when no step follows. Losses and norms have the same bits.
  bool update_first           = false;
  std::uint64_t seed          = 0;   // of dropout
  std::int64_t first_sequence = 0;   // of dropout: the number of the first sequence in the batch
  std::optional<RankSet> only = {};  // build the slice of these ranks alone
  // The norm of a weight that is not sharded: true: one data-parallel rank sums its squares, another rank for each
  // weight; false: every rank sums all squares.
  bool share_norm = true;
  // Gradients of tied weights that a rank has in one bucket stage are added before data-parallel ranks reduce them: one
  // reduction instead of two. The bits are then not those of other pipeline splits and sharding, so it is for worlds
  // whose reductions have other bits anyway (World::reduces_in_order).
  bool join_tied_first = false;
  // The machine on which Algorithm::adaptive simulates its candidates, and whose times PipelinePlan::balanced counts.
  // Null: nodes of `devices_per_node` ranks with 100 GB/s inside a node and 25 GB/s between nodes, and latencies of 2
  // and 5 microseconds; balanced stages count flops.
  const Machine* machine = nullptr;
  // The machine on which choices of offload and of Recompute::automatic are simulated. Null: updates are divided by
  // offload_rates alone, and layers are chosen on `machine`; if that is null, too: device_machine({}).
  const Machine* simulator = nullptr;
  // The order of communications that the world needs, for the memory plan that Plan::memory_limit_bytes is compared
  // with.
  IssueOrder issue_order = IssueOrder::any;
  // The workspaces that Plan::memory_limit_bytes counts: workspace_needs of the world. The graph has them either way.
  WorkspaceNeeds workspaces = {};
  // How much is offloaded, and so when updates run. None: what the fields of Plan::offload say, or what is chosen.
  std::optional<OffloadAmounts> offload     = {};
  std::map<Rank, OffloadAmounts> offload_of = {};  // of some ranks, instead
  // Updates are divided between device and host by these rates: usual_offload_rates where ranks are on devices. None:
  // the host does those of all units whose states are in its memory.
  std::optional<OffloadRates> offload_rates = {};
  // The memory of a rank's device, for strategies of offload without OffloadPlan::device_bytes; 0: not known.
  std::int64_t device_memory_bytes = 0;
  int window                       = 1;  // with UpdateWhen::asynchronous: steps of the window
};

// What a forward step computes: the mean loss, or the logits of every token.
enum class ForwardResult : std::uint8_t { loss, logits };

}  // namespace stepgraph
