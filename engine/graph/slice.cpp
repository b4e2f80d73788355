#include "engine/base/error.hpp"
#include "engine/graph/graph.hpp"

namespace stepgraph {

Graph slice(const Graph& graph, const RankSet& ranks) {
  if (!graph.ranks().contains(ranks)) {
    throw Error(ErrorKind::config,
                str("slice: ", to_string(ranks), " of a graph that holds only ", to_string(graph.ranks())));
  }
  Graph out(graph.num_ranks(), ranks);
  constexpr std::uint32_t elsewhere = ~std::uint32_t{0};
  std::vector<std::uint32_t> buffers(graph.num_buffers(), elsewhere), groups(graph.num_groups(), elsewhere);
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    if (out.holds(graph.spec(Buffer{i}).rank)) buffers[i] = out.buffer(graph.spec(Buffer{i})).id;
  }
  for (std::uint32_t i = 0; i < graph.num_groups(); ++i) {
    const GroupSpec& group = graph.spec(Group{i});
    if (ranks.num_in(group.ranks) > 0) groups[i] = out.group(group).id;
  }
  const auto renumber = [&](const AccessList& list) {
    AccessList renumbered;
    for (Access access : list.view()) {
      access.buffer.id = buffers[access.buffer.id];
      renumbered.push_back(access);
    }
    return renumbered;
  };
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    const Node node{i};
    if (!out.holds(graph.rank(node))) continue;
    NodeSpec spec    = graph.spec(node);
    spec.reads       = renumber(spec.reads);
    spec.writes      = renumber(spec.writes);
    spec.accumulates = renumber(spec.accumulates);
    if (spec.part) spec.part->group.id = groups[spec.part->group.id];
    out.add(spec, graph.body(node));
  }
  return out;
}

}  // namespace stepgraph
