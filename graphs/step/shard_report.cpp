#include "graphs/step/shard_report.hpp"

#include <algorithm>
#include <map>

#include "engine/base/error.hpp"
#include "graphs/models/weights.hpp"
#include "graphs/step/memory_requirement.hpp"

namespace stepgraph {
namespace {

std::int64_t local_elements(const StepGraph& step, const StepWeight& weight, int tp_index) {
  return num_elements(local_shape(step.spec(weight), step.layout.degree(Axis::tp), tp_index));
}

bool is_gathering(const Graph& graph, Node node) {
  return graph.op(node) == "all_gather" && graph.lane(node) == Lane{graph.rank(node), LaneKind::gather} &&
         graph.labels(node).phase != update_phase;
}

// "all_gather F layer3 mb0": the unit. Weights beside a flat follow the microbatch.
std::string unit_of(std::string_view name) {
  std::string_view rest = name.substr(std::string_view("all_gather F ").size());
  return std::string(rest.substr(0, rest.find(" mb")));
}

}  // namespace

std::string_view to_string(ShardState state) noexcept {
  switch (state) {
    case ShardState::sharded:
      return "sharded";
    case ShardState::gathering:
      return "gathering";
    case ShardState::gathered:
      return "gathered";
    case ShardState::resharding:
      return "resharding";
  }
  return "?";
}

std::vector<WeightShard> weight_shards(const StepGraph& step, const std::string& weight, int tp_index) {
  std::vector<WeightShard> found;
  bool known = false;
  for (std::size_t r = 0; r < step.ranks.size(); ++r) {
    if (step.ranks[r].coord.tp != tp_index) continue;
    for (const StepWeight& each : step.ranks[r].weights) {
      if (step.spec(each).name != weight) continue;
      known = true;
      if (!each.value.empty()) found.push_back({step.ranks.ranks()[r], {each.value.begin, each.value.end}});
    }
  }
  if (!known) {
    throw Error(ErrorKind::config, str("weight '", weight, "': not found in the step for tensor-parallel index ",
                                       tp_index, " (0 to ", step.layout.degree(Axis::tp) - 1, ")"));
  }
  return found;
}

ElementPlace find_element(const StepGraph& step, const std::string& weight, std::int64_t element, int tp_index) {
  std::int64_t size = 0;
  for (const WeightShard& shard : weight_shards(step, weight, tp_index)) {
    if (shard.elements.contains(element)) return {shard.owner, element - shard.elements.begin};
    size = std::max(size, shard.elements.end);
  }
  throw Error(ErrorKind::config, str("weight '", weight, "': has no element ", element, " (0 to ", size - 1, ")"));
}

ShardStats shard_stats(const StepGraph& step, const MemoryPlan& plan, Rank rank) {
  const StepRank& here = step.ranks.at(rank);
  ShardStats stats{.all_gathers     = here.num_all_gathers,
                   .reduce_scatters = here.num_reduce_scatters,
                   .all_reduces     = here.num_all_reduces};
  const auto add_kept = [&](const StoredRange& part) {
    if (part.empty()) return;
    const bool on_device = step.graph.spec(part.buffer).space == Space::device;
    (on_device ? stats.current_bytes : stats.beside_bytes) +=
        part.size() * static_cast<std::int64_t>(size_bytes(step.element_type(part.buffer)));
  };
  const bool adam = here.grad_norm != Buffer{} && step.optimizer == OptimizerKind::adamw;
  const auto wide = static_cast<std::int64_t>(size_bytes(wide_type(step.type)));
  const auto kept = static_cast<std::int64_t>(size_bytes(step.type)) +
                    wide * ((adam ? 2 : 1) + (wide_type(step.type) != step.type ? 1 : 0));
  std::int64_t local = 0, all = 0;
  for (const StepWeight& weight : here.weights) {
    const std::int64_t elements = local_elements(step, weight, here.coord.tp);
    stats.whole_bytes += elements * wide;  // its gradient
    const bool shares =
        weight.tied && std::any_of(here.weights.begin(), here.weights.end(), [&](const StepWeight& other) {
          return step.spec(other).name == step.spec(weight).tied_to;
        });
    if (shares) continue;
    all += elements;
    local += weight.value.size();
    stats.whole_bytes += elements * kept;
    for (const StoredRange& part : {weight.value, weight.first, weight.second, weight.master}) add_kept(part);
  }
  if (all > 0) stats.local_ratio = static_cast<double>(local) / static_cast<double>(all);
  const MemoryRequirement needed = memory_requirement(step, plan, rank);
  for (const MemoryRole role :
       {MemoryRole::parameters, MemoryRole::gradients, MemoryRole::optimizer, MemoryRole::slots}) {
    stats.peak_bytes += needed[role];
  }
  stats.saved_bytes = stats.whole_bytes - stats.peak_bytes;
  return stats;
}

std::vector<ShardInterval> shard_states(const StepGraph& step, const Timeline& timeline, Rank rank) {
  const Graph& graph = step.graph;
  struct Stay {
    std::string unit;
    double begin_s, whole_s, used_s;
  };
  std::map<std::uint32_t, Stay> stays;  // by the slot's buffer
  std::vector<ShardInterval> found;
  const auto end_stay = [&](const Stay& stay, double free_s) {
    found.push_back({stay.unit, ShardState::gathering, stay.begin_s, stay.whole_s});
    found.push_back({stay.unit, ShardState::gathered, stay.whole_s, stay.used_s});
    found.push_back({stay.unit, ShardState::resharding, stay.used_s, std::max(stay.used_s, free_s)});
  };
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    if (graph.rank(Node{node}) != rank) continue;
    const NodeTime& time = timeline.nodes[node];
    for (std::size_t i = 0; i < graph.num_accesses(Node{node}); ++i) {
      const Graph::AccessView access = graph.access(Node{node}, i);
      const auto stay                = stays.find(access.buffer.id);
      if (is_gathering(graph, Node{node}) && access.mode == AccessMode::write && !graph.spec(access.buffer).token) {
        const std::string unit = unit_of(graph.name(Node{node}));
        const bool goes_on     = stay != stays.end() && stay->second.unit == unit && stay->second.used_s < 0;
        if (stay != stays.end() && !goes_on) end_stay(stay->second, time.begin_s);
        if (goes_on) {
          stay->second.whole_s = std::max(stay->second.whole_s, time.end_s);
        } else {
          stays.insert_or_assign(access.buffer.id, Stay{unit, time.begin_s, time.end_s, -1});
        }
      } else if (stay != stays.end() && reads(access.mode)) {
        stay->second.used_s = std::max({stay->second.used_s, stay->second.whole_s, time.end_s});
      }
    }
  }
  for (const auto& [buffer, stay] : stays) end_stay(stay, timeline.makespan_s);
  std::stable_sort(found.begin(), found.end(),
                   [](const ShardInterval& a, const ShardInterval& b) { return a.begin_s < b.begin_s; });
  return found;
}

}  // namespace stepgraph
