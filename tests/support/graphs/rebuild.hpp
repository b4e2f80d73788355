#pragma once
#include <functional>

#include "engine/graph/graph.hpp"

namespace stepgraph::testing {

// A copy of the graph without bodies. `change` may edit the declaration of each node.
[[nodiscard]] Graph rebuild(const Graph& graph, const std::function<void(Node, NodeSpec&)>& change);

}  // namespace stepgraph::testing
