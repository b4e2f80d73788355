#pragma once
#include <optional>
#include <vector>

#include "engine/graph.hpp"
#include "engine/matching.hpp"
#include "graphs/collective_algorithms.hpp"
#include "graphs/collective_rounds.hpp"

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
