#pragma once
#include <optional>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/graph/matching.hpp"
#include "graphs/collectives/algorithms.hpp"
#include "graphs/collectives/rounds.hpp"

// Rounds as nodes: internal to graphs/.
namespace stepgraph {

struct Expansion {
  Rounds rounds;
  Algorithm algorithm = Algorithm::ring;
};

// Whether what the part reads and what it writes are the same bytes, where its operation allows that.
[[nodiscard]] bool is_in_place(const Graph& graph, Node part);

// The graph with the parts of some meetings replaced; `expansions` by meeting, none: as they are.
[[nodiscard]] Graph emit(const Graph& graph, const Matching& matching,
                         const std::vector<std::optional<Expansion>>& expansions);

}  // namespace stepgraph
