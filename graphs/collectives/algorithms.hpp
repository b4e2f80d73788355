#pragma once
#include <cstdint>
#include <limits>
#include <ostream>
#include <string_view>

#include "engine/graph/graph.hpp"
#include "engine/simulate/machine.hpp"

namespace stepgraph {

// The algorithm of a collective.
//   direct        one operation, executed by the world; reductions are in rank order, to the bit
//   ring          all_reduce, all_gather and reduce_scatter go around a ring, a segment at a time; broadcast and reduce
//                 along a chain, in segments; gather and scatter along a chain; all_to_all neighbour by neighbour; a
//                 barrier around the ring
//   tree          up a binomial tree, down it, or both; all_to_all: Bruck's algorithm
//   hierarchical  all_reduce, all_gather and reduce_scatter: rings inside nodes and across them; all_to_all: two hops;
//                 others: trees inside nodes, then across
//   adaptive      the fastest of these for the size, as simulated on a machine
enum class Algorithm : std::uint8_t { direct, ring, tree, hierarchical, adaptive };
[[nodiscard]] std::string_view to_string(Algorithm algorithm) noexcept;
[[nodiscard]] Algorithm parse_algorithm(std::string_view name);  // throws Error(config) that lists the names
inline std::ostream& operator<<(std::ostream& out, Algorithm algorithm) { return out << to_string(algorithm); }

struct ExpandOptions {
  Algorithm algorithm    = Algorithm::ring;
  int ranks_per_node     = 8;        // hierarchical: ranks r with equal r / ranks_per_node are one node
  const Machine* machine = nullptr;  // adaptive: where the candidates are simulated
  double most_nodes      = std::numeric_limits<double>::infinity();  // of the result; a candidate is at most that large
};

// The form that `expand_collectives` gives to a part's collective. Direct, that is none, for a group of one member, a
// message, a permutation and a barrier without a lane; for gather, scatter and all_to_all with uneven shards; and for
// an average of u8, i32 or f16: partial sums may not fit the type. Hierarchical is the ring where all members
// are on one node or each on its own, and direct where nodes have unequal numbers of them. Adaptive is what it chooses.
[[nodiscard]] Algorithm form_of(const Graph& graph, Node part, const ExpandOptions& options);

// A pass: replaces each collective that is not direct by messages, copies and reductions of segments, on the
// collective's own lane, and leaves everything else as it is. Buffers keep their numbers. What was issued before a
// collective is issued before all of it. Reductions are no longer in rank order: equal to direct where every partial
// result is exactly representable, else within rounding. Throws Error(graph) when parts that meet do not fit together,
// and Error(config) if the result would have more than about `most_nodes` nodes, before it is made.
//
// A graph of one rank expands to the slice of the expanded whole. Which form a gather, scatter or all_to_all has
// depends on what other members declare, so there those are refused (Error(config)): expand first, then slice. So is a
// collective that its rank issues together with other parts.
[[nodiscard]] Graph expand_collectives(const Graph& graph, const ExpandOptions& options);

}  // namespace stepgraph
