#pragma once
#include <cstdint>
#include <ostream>
#include <string_view>

#include "engine/graph.hpp"
#include "engine/machine.hpp"

namespace stepgraph {

// How the members of a collective get it done between them.
//
//                   all_reduce, all_gather, reduce_scatter   broadcast, reduce    gather, scatter   all_to_all barrier
//   direct          one operation, as the world does it: reductions in rank order, to the bit
//   ring            around a circle, a chunk at a time       along a chain, in    along a chain     neighbour    around
//                                                            pieces                                 by neighbour a
//                                                            circle
//   tree            up a binomial tree and down              down or up           up or down        Bruck        up and
//   down hierarchical    rings inside nodes and across them (all to all: in two hops; others: trees inside nodes, then
//   across) adaptive        whichever of these is fastest for the size, as simulated on a machine
enum class Algorithm : std::uint8_t { direct, ring, tree, hierarchical, adaptive };
[[nodiscard]] std::string_view to_string(Algorithm algorithm) noexcept;
[[nodiscard]] Algorithm parse_algorithm(std::string_view name);  // throws Error(config) that lists the names
inline std::ostream& operator<<(std::ostream& out, Algorithm algorithm) { return out << to_string(algorithm); }

struct ExpandOptions {
  Algorithm algorithm    = Algorithm::ring;
  int ranks_per_node     = 8;        // hierarchical: ranks r with equal r / ranks_per_node are one node
  const Machine* machine = nullptr;  // adaptive: where the candidates are simulated
};

// What an algorithm makes of a part: none when it has no form for it. A group of one member, a message, a permutation
// and a barrier without a lane stay as they are; gather, scatter and all_to_all need even shards; hierarchical needs
// nodes with equally many consecutive members, and more than one of each, else it is the ring.
[[nodiscard]] bool has_form(const Graph& graph, Node part, const ExpandOptions& options);

// A pass: replaces each collective for which the algorithm has a form by messages, copies and reductions of chunks, on
// the collective's own lane, and leaves everything else as it is. Buffers keep their numbers. What was issued before a
// collective is issued before all of it. Reductions are no longer in rank order: equal to direct where every partial
// result is exactly representable, else within rounding.
//
// A graph of one rank expands to the slice of the expanded whole. Which form a gather, scatter or all_to_all has
// depends on what other members declare, so there those are refused (Error(config)): expand first, then slice. So is a
// collective that its rank issues together with other parts.
[[nodiscard]] Graph expand_collectives(const Graph& graph, const ExpandOptions& options);

}  // namespace stepgraph
