#include "graphs/step/with_bodies.hpp"

#include "engine/graph/without_nodes.hpp"

namespace stepgraph {

Graph with_bodies(const Graph& graph, const std::function<Body(Node node, const Body& body)>& change) {
  Graph made = without_nodes(graph);
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    const Node node{i};
    made.add(graph.spec(node), graph.has_part(node) ? graph.body(node) : change(node, graph.body(node)));
  }
  return made;
}

void call_body(const Body& body, const Context& context) {
  if (!body) return;
  void* const closure = body.closure();
  body.invoke()(&closure, context);
}

}  // namespace stepgraph
