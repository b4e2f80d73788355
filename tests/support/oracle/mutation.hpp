#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "engine/graph/edges.hpp"
#include "engine/graph/graph.hpp"
#include "tests/support/graphs/random_graph.hpp"

namespace stepgraph::testing {

// One change to a graph or to its order.
enum class Mutation {
  // Edges inside one run.
  remove_edge,
  redirect_edge,
  add_forward_edge,
  add_backward_edge,
  // Edges from one run to the next.
  remove_loop_edge,
  redirect_loop_edge,
  add_loop_edge,
  // The bytes that a node accesses; for parts, the bytes sent or received.
  shift_access,
  resize_access,
  stride_access,
  resize_part,
  // Other declarations of a node or a buffer.
  change_mode,
  change_buffer,
  change_lifetime,
  change_lane,
  // Parts.
  change_op,
  change_type,
  change_root,
  change_message,
  change_peer,
  change_source,
  change_reduction,
  change_group,
  swap_issue,
  change_issue,
  unpart,  // becomes a plain node
  drop_part,
  reorder_parts,
};
inline constexpr std::size_t num_mutations = static_cast<std::size_t>(Mutation::reorder_parts) + 1;
[[nodiscard]] std::string_view to_string(Mutation mutation) noexcept;

struct Mutant {
  Graph graph;
  Edges edges;
};

// The graph with one random change and its old edges (derived again only if nodes were renumbered). None if this
// mutation does not apply or the draw changed nothing. Throws the graph's Error(config) if the graph refuses the
// change.
[[nodiscard]] std::optional<Mutant> mutate(const Graph& graph, const Edges& edges, Mutation mutation, Random& random);

// The same order with some implied edges added, so that losing an edge may be harmless.
[[nodiscard]] Edges with_implied_edges(const Graph& graph, const Edges& edges, Random& random);

// A full description of a small graph, for the message of a failing test.
[[nodiscard]] std::string dump(const Graph& graph, const Edges& edges);

}  // namespace stepgraph::testing
