#include "engine/run/waiting_lanes.hpp"

#include <algorithm>

#include "engine/base/error.hpp"

namespace stepgraph {

std::vector<Lane> waiting_lanes(const Graph& graph, const World& world) {
  std::vector<Lane> lanes;
  for (int rank = 0; rank < graph.num_ranks(); ++rank) {
    if (!world.is_local(Rank{rank})) continue;
    for (std::size_t kind = 0; kind < num_lane_kinds; ++kind) {
      const Lane lane{Rank{rank}, static_cast<LaneKind>(kind)};
      if (world.waits(lane.kind) && graph.lane_size(lane) > 0) lanes.push_back(lane);
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
