#include "graphs/step/recompute.hpp"

#include <vector>

namespace stepgraph {

Graph recompute(const Graph& graph, Recompute kind) {
  using Role = RecomputePlace::Role;
  if (kind == Recompute::none) return graph;
  std::vector<char> attended(graph.num_buffers(), 0);
  const auto place_of = [&](Node node) -> RecomputePlace {
    const Labels labels = graph.labels(node);
    if (labels.microbatch < 0 || labels.layer < 0 || labels.phase.empty() || labels.phase == recompute_phase) return {};
    const std::int64_t region = (std::int64_t{labels.microbatch} << 32) + labels.layer;
    if (labels.phase == "forward") {
      const bool within = kind == Recompute::full || graph.op(node) == "attention";
      return {within ? Role::region : Role::outside, region};
    }
    bool reader = kind == Recompute::full;
    for (std::size_t i = 0; i < graph.num_accesses(node) && !reader; ++i) {
      reader = reads(graph.access(node, i).mode) && attended[graph.access(node, i).buffer.id] != 0;
    }
    return {reader ? Role::reader : Role::outside, region};
  };
  for (std::uint32_t i = 0; i < graph.num_nodes() && kind == Recompute::selective; ++i) {
    if (place_of(Node{i}).role != Role::region) continue;
    for (std::size_t a = 0; a < graph.num_accesses(Node{i}); ++a) {
      const auto access = graph.access(Node{i}, a);
      if (writes(access.mode)) attended[access.buffer.id] = 1;
    }
  }
  return recompute(graph, place_of);
}

}  // namespace stepgraph
