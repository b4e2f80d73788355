#pragma once
#include "engine/graph/graph.hpp"

namespace stepgraph {

// The ranks, buffers and groups of a graph, with their numbers: for passes, which add their own nodes.
[[nodiscard]] Graph without_nodes(const Graph& graph);

}  // namespace stepgraph
