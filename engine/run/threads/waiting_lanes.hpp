#pragma once
#include <span>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/run/world.hpp"

// Lanes that need a thread of their own, because their nodes block it: internal to engine/.
namespace stepgraph {

// Whether a node blocks its thread in a world without a device: it is on a lane on which the world waits. On a lane for
// communication only parts wait; other nodes on it compute.
[[nodiscard]] bool waits(const Graph& graph, Node node, const World& world);

// Whether parts block their thread: the world waits on some lane for communication.
[[nodiscard]] bool parts_wait(const World& world);

// The lanes, of ranks of this process, with nodes that block their thread; on a device, those with host nodes.
[[nodiscard]] std::vector<Lane> waiting_lanes(const Graph& graph, const World& world);

// "rank 0 host, rank 0 disk"; of more than eight lanes the first eight and "...".
[[nodiscard]] std::string lane_names(std::span<const Lane> lanes);

}  // namespace stepgraph
