#include "graphs/shard_report.hpp"

#include <algorithm>
#include <map>

#include "engine/error.hpp"
#include "graphs/weights.hpp"

namespace stepgraph {
namespace {

const StepRank& rank_of(const StepGraph& step, Rank rank) { return step.ranks[static_cast<std::size_t>(index(rank))]; }

std::int64_t local_elements(const StepGraph& step, const StepWeight& weight, int tp_index) {
  return num_elements(local_shape(step.spec(weight), step.layout.degree(Axis::tp), tp_index));
}

bool is_gathering(const Graph& graph, Node node) {
  return graph.op(node) == "all_gather" && graph.lane(node) == Lane{graph.rank(node), LaneKind::gather} &&
         graph.labels(node).phase != "update";
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
      if (!each.value.empty()) found.push_back({Rank{static_cast<int>(r)}, each.value.begin, each.value.size()});
    }
  }
  if (!known) {
    throw Error(ErrorKind::config,
                str("weight '", weight, "': the step has none of that name for tensor-parallel index ", tp_index,
                    " (0 to ", step.layout.degree(Axis::tp) - 1, ")"));
  }
  return found;
}

ElementPlace find_element(const StepGraph& step, const std::string& weight, std::int64_t element, int tp_index) {
  std::int64_t size = 0;
  for (const WeightShard& shard : weight_shards(step, weight, tp_index)) {
    if (shard.begin <= element && element < shard.begin + shard.size) return {shard.owner, element - shard.begin};
    size = std::max(size, shard.begin + shard.size);
  }
  throw Error(ErrorKind::config, str("weight '", weight, "': has no element ", element, " (0 to ", size - 1, ")"));
}

ShardStats shard_stats(const StepGraph& step, Rank rank) {
  ShardStats stats;
  const Graph& graph = step.graph;
  const auto size    = [&](Buffer buffer) { return static_cast<std::int64_t>(size_bytes(graph.spec(buffer).type)); };
  std::int64_t local = 0, all = 0;
  const std::int64_t wide = static_cast<std::int64_t>(size_bytes(wide_type(step.type)));
  for (const StepWeight& weight : rank_of(step, rank).weights) {
    const std::int64_t elements = local_elements(step, weight, rank_of(step, rank).coord.tp);
    const bool own              = !weight.tied || !std::any_of(rank_of(step, rank).weights.begin(),
                                                               rank_of(step, rank).weights.end(), [&](const StepWeight& other) {
                                                    return step.spec(other).name == step.spec(weight).tied_to;
                                                  });
    stats.whole_bytes += elements * wide;  // its gradient
    if (!own) continue;
    all += elements;
    local += weight.value.size();
    stats.whole_bytes += elements * static_cast<std::int64_t>(size_bytes(step.type));
    for (const WeightPart* part : {&weight.value, &weight.first, &weight.second, &weight.master}) {
      if (!part->empty()) stats.current_bytes += part->size() * size(part->buffer);
    }
    const bool adam = rank_of(step, rank).weights.front().second.buffer != Buffer{};
    stats.whole_bytes += elements * wide * ((adam ? 2 : 1) + (wide_type(step.type) != step.type));
  }
  if (all > 0) stats.local_ratio = static_cast<double>(local) / static_cast<double>(all);
  stats.peak_bytes = stats.current_bytes;
  std::vector<bool> touched(graph.num_buffers());
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    if (graph.rank(Node{node}) != rank) continue;
    stats.all_gathers += is_gathering(graph, Node{node}) ||
                         (graph.op(Node{node}) == "all_gather" && graph.labels(Node{node}).phase == "update");
    stats.reduce_scatters += graph.op(Node{node}) == "reduce_scatter" && graph.labels(Node{node}).phase == "reduce";
    stats.all_reduces += graph.op(Node{node}) == "all_reduce" && graph.labels(Node{node}).phase == "reduce";
    for (std::size_t i = 0; i < graph.num_accesses(Node{node}); ++i)
      touched[graph.access(Node{node}, i).buffer.id] = true;
  }
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& spec = graph.spec(Buffer{i});
    if (spec.rank != rank || spec.lifetime != Lifetime::step || !touched[i]) continue;
    for (const std::string_view kind : {"weight slot ", "gathered ", "gradient slot ", "gradients of ", "gradient of ",
                                        "bucket ", "incoming gradient of ", "kept "}) {
      if (!spec.name.starts_with(kind)) continue;
      stats.peak_bytes += spec.size_bytes;
      break;
    }
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
