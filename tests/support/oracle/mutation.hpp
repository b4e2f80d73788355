#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "engine/graph/edges.hpp"
#include "engine/graph/graph.hpp"
#include "tests/support/random_graph.hpp"

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
  // Which bytes a node touches; of parts, how many they send or receive.
  shift_access,
  resize_access,
  stride_access,
  resize_part,
  // What else a node or a buffer declares.
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

// The graph with one random change, under its old edges (derived anew only where nodes changed their numbers).
// None: there is nothing to change in this way, or the draw changed nothing. Throws the graph's Error(config) when it
// refuses the change.
[[nodiscard]] std::optional<Mutant> mutate(const Graph& graph, const Edges& edges, Mutation mutation, Random& random);

// The same order with some edges added that it implies already, so that losing one may be harmless.
[[nodiscard]] Edges with_implied_edges(const Graph& graph, const Edges& edges, Random& random);

// Everything there is to know about a small graph, for the message of a failing test.
[[nodiscard]] std::string dump(const Graph& graph, const Edges& edges);

}  // namespace stepgraph::testing
