#include "engine/run/waiting_lanes.hpp"

#include <algorithm>

#include "engine/base/error.hpp"

namespace stepgraph {

std::vector<Lane> waiting_lanes(const Graph& graph, const World& world) {
  const bool on_device = world.device() != nullptr;
  std::vector<char> has_host_nodes(static_cast<std::size_t>(graph.num_ranks()) * num_lane_kinds, 0);
  const auto place = [](Lane lane) {
    return static_cast<std::size_t>(index(lane.rank)) * num_lane_kinds + static_cast<std::size_t>(lane.kind);
  };
  for (std::uint32_t node = 0; on_device && node < graph.num_nodes(); ++node) {
    const auto lane = graph.lane(Node{node});
    if (lane && graph.kind(Node{node}) == NodeKind::host) has_host_nodes[place(*lane)] = 1;
  }
  std::vector<Lane> lanes;
  for (int rank = 0; rank < graph.num_ranks(); ++rank) {
    if (!world.is_local(Rank{rank})) continue;
    for (std::size_t kind = 0; kind < num_lane_kinds; ++kind) {
      const Lane lane{Rank{rank}, static_cast<LaneKind>(kind)};
      const bool waits = on_device ? has_host_nodes[place(lane)] != 0 : world.waits(lane.kind);
      if (waits && graph.lane_size(lane) > 0) lanes.push_back(lane);
    }
  }
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
