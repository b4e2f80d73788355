#pragma once
#include <cstdint>
#include <vector>

#include "engine/graph/edges.hpp"
#include "engine/graph/graph.hpp"

namespace stepgraph {

// The order in which a rank must start its communications. A network needs it; the graph alone does not. Each value
// includes the ones before it.
enum class IssueOrder : std::uint8_t {
  any,               // no order beyond the graph's edges: all ranks share a process
  per_communicator,  // a rank starts the operations of one group one after another (MPI, Gloo)
  per_rank,          // a rank starts all its operations one after another (NCCL)
};

// The graph's edges, plus an edge wherever `order` asks for one that the edges do not imply yet: from each part to the
// parts with the next issue position (PartSpec::issue) of the same rank or communicator. Parts that share an issue
// position get no edge between them. Throws Error(graph) when the issue order contradicts the edges.
[[nodiscard]] Edges edges_in_issue_order(const Graph& graph, IssueOrder order);

// The nodes that are parts: by rank, then by issue position, then in the order of adding.
[[nodiscard]] std::vector<std::uint32_t> parts_in_issue_order(const Graph& graph);

}  // namespace stepgraph
