#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/graph/timeline.hpp"
#include "engine/plan/memory_plan.hpp"
#include "graphs/layout/index_range.hpp"
#include "graphs/step/step_graph.hpp"

// Reports on a sharded step: the owners of shards, the memory that sharding saves, and when units are gathered.
namespace stepgraph {

// The elements of a weight that one rank keeps, counted on one tensor-parallel rank.
struct WeightShard {
  Rank owner                                                     = {};
  IndexRange elements                                            = {};
  friend bool operator==(const WeightShard&, const WeightShard&) = default;
};
// The non-empty shards of a weight's value, in rank order. A weight that is not sharded has one for each rank. Throws
// Error(config) for a weight that the model does not have.
[[nodiscard]] std::vector<WeightShard> weight_shards(const StepGraph& step, const std::string& weight,
                                                     int tp_index = 0);
// The first rank that has an element, and the element's index in its shard.
struct ElementPlace {
  Rank owner         = {};
  std::int64_t local = 0;
};
[[nodiscard]] ElementPlace find_element(const StepGraph& step, const std::string& weight, std::int64_t element,
                                        int tp_index = 0);

// The effect of sharding on one rank, in bytes of weights, gradients and optimizer state.
struct ShardStats {
  std::int64_t whole_bytes   = 0;  // without sharding
  std::int64_t current_bytes = 0;  // that the rank keeps on the device from one step to the next ...
  std::int64_t beside_bytes  = 0;  // ... and in host memory or on disk, before compression
  std::int64_t peak_bytes    = 0;  // on the device, with slots, at the peak of the step
  std::int64_t saved_bytes   = 0;  // whole_bytes - peak_bytes; negative where slots take more than sharding saves
  double local_ratio         = 1;  // the rank's share of the elements of its weights
  int all_gathers            = 0;  // in a step
  int reduce_scatters        = 0;
  int all_reduces            = 0;  // of gradients
};
[[nodiscard]] ShardStats shard_stats(const StepGraph& step, const MemoryPlan& plan, Rank rank);

// The state of a unit's weights on a rank, over the time of a step.
enum class ShardState : std::uint8_t { sharded, gathering, gathered, resharding };
[[nodiscard]] std::string_view to_string(ShardState state) noexcept;
struct ShardInterval {
  std::string unit = {};
  ShardState state = ShardState::sharded;
  double begin_s   = 0;
  double end_s     = 0;
};
// The intervals of a simulated or recorded step, in the order of time. `resharding` lasts from the last use to the next
// tenant of the slot. Outside all intervals a unit is sharded. For Algorithm::direct only.
[[nodiscard]] std::vector<ShardInterval> shard_states(const StepGraph& step, const Timeline& timeline, Rank rank);

}  // namespace stepgraph
