#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/graph/timeline.hpp"
#include "engine/plan/memory_plan.hpp"
#include "graphs/layout/index_range.hpp"
#include "graphs/step/step_graph.hpp"

// Looking at a sharded step: who has what, how much it is, and when it is whole.
namespace stepgraph {

// The elements of a weight that one rank keeps, counted on one tensor-parallel rank.
struct WeightShard {
  Rank owner                                                     = {};
  IndexRange elements                                            = {};
  friend bool operator==(const WeightShard&, const WeightShard&) = default;
};
// Who keeps which part of a weight's value, those that keep any, in the order of ranks; a weight that is whole
// everywhere has one for each. Throws Error(config) for a weight that the model does not have.
[[nodiscard]] std::vector<WeightShard> weight_shards(const StepGraph& step, const std::string& weight,
                                                     int tp_index = 0);
// The first that has an element, and where it is in its part.
struct ElementPlace {
  Rank owner         = {};
  std::int64_t local = 0;
};
[[nodiscard]] ElementPlace find_element(const StepGraph& step, const std::string& weight, std::int64_t element,
                                        int tp_index = 0);

// What sharding does for one rank, in bytes of weights, their gradients and the optimizer's state.
struct ShardStats {
  std::int64_t whole_bytes   = 0;  // if the rank kept all of it
  std::int64_t current_bytes = 0;  // that it keeps from one step to the next
  std::int64_t peak_bytes    = 0;  // of it and of slots, where the step needs most memory
  std::int64_t saved_bytes   = 0;  // whole_bytes less peak_bytes; below 0 where slots take more than sharding saves
  double local_ratio         = 1;  // the rank's share of the elements of its weights
  int all_gathers            = 0;  // in a step
  int reduce_scatters        = 0;
  int all_reduces            = 0;  // of gradients
};
[[nodiscard]] ShardStats shard_stats(const StepGraph& step, const MemoryPlan& plan, Rank rank);

// Whether a unit's weights are whole on a rank, over the time of a step.
enum class ShardState : std::uint8_t { sharded, gathering, gathered, resharding };
[[nodiscard]] std::string_view to_string(ShardState state) noexcept;
struct ShardInterval {
  std::string unit = {};
  ShardState state = ShardState::sharded;
  double begin_s   = 0;
  double end_s     = 0;
};
// In the order of time, of a step that was simulated or recorded; from `gathered` on until the memory is another's it
// is `resharding`. In between it is sharded. Of collectives that run as they are (Algorithm::direct).
[[nodiscard]] std::vector<ShardInterval> shard_states(const StepGraph& step, const Timeline& timeline, Rank rank);

}  // namespace stepgraph
