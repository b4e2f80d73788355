#include "graphs/step/recompute.hpp"

#include <vector>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

using Role = RecomputePlace::Role;

bool is_attention(const Graph& graph, Node node) { return graph.op(node) == "attention"; }

}  // namespace

Graph recompute(const Graph& graph, Recompute kind) {
  if (kind == Recompute::none) return graph;
  if (kind == Recompute::automatic)
    throw Error(ErrorKind::config, "recompute: auto is not a choice yet (none, selective or full for each layer)");
  return recompute(graph, [kind](Rank, int) { return kind; });
}

Graph recompute(const Graph& graph, const RecomputeOfLayer& kind_of) {
  std::vector<char> attended(graph.num_buffers(), 0);  // buffers that are written by attention that runs again
  const auto place_of = [&](Node node) -> RecomputePlace {
    const Labels labels = graph.labels(node);
    if (labels.microbatch < 0 || labels.layer < 0 || labels.phase.empty() || labels.phase == recompute_phase) return {};
    const Recompute kind = kind_of(graph.rank(node), labels.layer);
    if (kind == Recompute::none) return {};
    const std::int64_t region = (std::int64_t{labels.microbatch} << 32) + labels.layer;
    if (labels.phase == "forward") {
      const bool within = kind == Recompute::full || is_attention(graph, node);
      return {within ? Role::region : Role::outside, region};
    }
    bool reader = kind == Recompute::full;
    for (std::size_t i = 0; i < graph.num_accesses(node) && !reader; ++i) {
      reader = reads(graph.access(node, i).mode) && attended[graph.access(node, i).buffer.id] != 0;
    }
    return {reader ? Role::reader : Role::outside, region};
  };
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    if (!is_attention(graph, Node{i}) || place_of(Node{i}).role != Role::region) continue;
    for (std::size_t a = 0; a < graph.num_accesses(Node{i}); ++a) {
      const auto access = graph.access(Node{i}, a);
      if (writes(access.mode)) attended[access.buffer.id] = 1;
    }
  }
  return recompute(graph, RecomputePlaces(place_of));
}

}  // namespace stepgraph
