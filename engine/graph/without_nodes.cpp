#include "engine/graph/without_nodes.hpp"

namespace stepgraph {

Graph without_nodes(const Graph& graph) {
  Graph made(graph.num_ranks(), graph.ranks());
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& spec = graph.spec(Buffer{i});
    static_cast<void>(spec.token ? made.token(spec.rank, spec.name) : made.buffer(spec));
  }
  for (std::uint32_t i = 0; i < graph.num_groups(); ++i) static_cast<void>(made.group(graph.spec(Group{i})));
  return made;
}

}  // namespace stepgraph
