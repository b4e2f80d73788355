#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// For each lane of the node's rank: the number of its nodes that come before the node, the node itself included.
using LaneClock = std::array<std::uint32_t, num_lane_kinds>;

// The order of a graph's nodes, inside each rank. Compressed rows: the predecessors of node i are
// preds[pred_begin[i] .. pred_begin[i + 1]), ascending. A `loop` edge leads from a node of one run of the graph to a
// node of the next run. Edges that follow from lanes and other edges are left out.
struct Edges {
  std::vector<std::uint32_t> pred_begin;
  std::vector<std::uint32_t> preds;
  std::vector<std::uint32_t> loop_begin;
  std::vector<std::uint32_t> loop_preds;
  std::vector<LaneClock> clocks;  // empty when the graph has no lanes

  [[nodiscard]] std::span<const std::uint32_t> before(Node node) const;       // direct predecessors
  [[nodiscard]] std::span<const std::uint32_t> before_loop(Node node) const;  // direct predecessors in the previous run
  friend bool operator==(const Edges&, const Edges&) = default;
};

[[nodiscard]] Edges derive(const Graph& graph);

// Whether a must have finished before b starts. Constant time when a is on a lane, else a search between the two.
[[nodiscard]] bool reaches(const Graph& graph, Node a, Node b);

}  // namespace stepgraph
