#include "engine/run/threads/waiting_lanes.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "engine/base/error.hpp"

namespace stepgraph {

bool waits(const Graph& graph, Node node, const World& world) {
  const auto lane = graph.lane(node);
  return lane && world.waits(lane->kind) && (graph.has_part(node) || !is_for_parts(lane->kind));
}

bool parts_wait(const World& world) {
  for (std::size_t kind = 0; kind < num_lane_kinds; ++kind) {
    const auto lane = static_cast<LaneKind>(kind);
    if (is_for_parts(lane) && world.waits(lane)) return true;
  }
  return false;
}

std::vector<Lane> waiting_lanes(const Graph& graph, const World& world) {
  const bool on_device = world.device() != nullptr;
  std::set<std::pair<Rank, LaneKind>> found;
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    const bool blocks = on_device ? graph.kind(Node{node}) == NodeKind::host : waits(graph, Node{node}, world);
    if (const auto lane = graph.lane(Node{node}); lane && blocks) found.emplace(lane->rank, lane->kind);
  }
  std::vector<Lane> lanes;
  for (const auto& [rank, kind] : found) lanes.push_back({rank, kind});
  return lanes;
}

std::string lane_names(std::span<const Lane> lanes) {
  constexpr std::size_t most = 8;
  std::string names;
  for (const Lane& lane : lanes.first(std::min(lanes.size(), most)))
    names += str(names.empty() ? "" : ", ", "rank ", lane.rank, " ", lane.kind);
  return lanes.size() > most ? names + ", ..." : names;
}

}  // namespace stepgraph
