#pragma once
#include <functional>

#include "engine/graph/graph.hpp"

namespace stepgraph::testing {

// The graph once more, without bodies, each node as `change` leaves its declaration.
[[nodiscard]] Graph rebuild(const Graph& graph, const std::function<void(Node, NodeSpec&)>& change);

}  // namespace stepgraph::testing
