#pragma once
#include <cstdint>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/graph/timeline.hpp"

namespace stepgraph {

// The turn of every node: its place in an order in which a node comes after everything it waits for (edges, its lane,
// and earlier issue positions of its rank). Turns count from 0. Nodes that run at the same time share one turn: matched
// parts, and parts that a rank issues together. Nodes that do not wait for each other are ordered by start time in
// `timeline`. Throws Error(graph) if there is a cycle of waits.
[[nodiscard]] std::vector<std::uint32_t> order_nodes(const Graph& graph, const Timeline& timeline);

}  // namespace stepgraph
