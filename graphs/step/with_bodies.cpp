#include "graphs/step/with_bodies.hpp"

namespace stepgraph {

Graph with_bodies(const Graph& graph, const std::function<Body(Node node, const Body& body)>& change) {
  Graph made(graph.num_ranks(), graph.ranks());
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& spec = graph.spec(Buffer{i});
    static_cast<void>(spec.token ? made.token(spec.rank, spec.name) : made.buffer(spec));
  }
  for (std::uint32_t i = 0; i < graph.num_groups(); ++i) static_cast<void>(made.group(graph.spec(Group{i})));
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
