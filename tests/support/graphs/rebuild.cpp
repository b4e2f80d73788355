#include "tests/support/graphs/rebuild.hpp"

namespace stepgraph::testing {

Graph rebuild(const Graph& graph, const std::function<void(Node, NodeSpec&)>& change) {
  Graph out(graph.num_ranks());
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& spec = graph.spec(Buffer{i});
    (void)(spec.token ? out.token(spec.rank, spec.name) : out.buffer(spec));
  }
  for (std::uint32_t i = 0; i < graph.num_groups(); ++i) (void)out.group(graph.spec(Group{i}));
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    NodeSpec spec = graph.spec(Node{i});
    change(Node{i}, spec);
    out.add(spec);
  }
  return out;
}

}  // namespace stepgraph::testing
