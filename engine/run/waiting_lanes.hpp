#pragma once
#include <span>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/run/world.hpp"

// Lanes that need a thread of their own, because their nodes block it: internal to engine/.
namespace stepgraph {

// The lanes, of ranks of this process, whose nodes block their thread: those on which the world waits; on a device,
// those with host nodes.
[[nodiscard]] std::vector<Lane> waiting_lanes(const Graph& graph, const World& world);

// "rank 0 host, rank 0 disk"; of more than eight lanes the first eight and "...".
[[nodiscard]] std::string lane_names(std::span<const Lane> lanes);

}  // namespace stepgraph
