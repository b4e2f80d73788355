#pragma once
#include <cstdint>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/graph/timeline.hpp"

namespace stepgraph {

// A position for every node, such that whatever waits comes after what it waits for: edges, lanes, and a rank's parts
// in their issue order. What can only happen at once, parts that meet and parts that a rank issues together, has one
// position. Among nodes that do not wait for each other, the earlier in `timeline` comes first.
// Throws Error(graph) when they wait in a circle.
[[nodiscard]] std::vector<std::uint32_t> order_nodes(const Graph& graph, const Timeline& timeline);

}  // namespace stepgraph
