#pragma once
#include <functional>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// The same graph with other bodies: for benchmarks and tests that slow a rank down or watch what runs. `change` gets
// each node that is not a part, and its body, which may be empty.
[[nodiscard]] Graph with_bodies(const Graph& graph, const std::function<Body(Node node, const Body& body)>& change);

// Calls the body of a node: for bodies that do more than that.
void call_body(const Body& body, const Context& context);

}  // namespace stepgraph
