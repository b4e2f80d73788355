#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/run/step.hpp"
#include "engine/run/world.hpp"

namespace stepgraph {

// A graph as the tasks of one process: internal to engine/, and still without Taskflow.
struct Lowering {
  std::vector<Match> matches;
  std::vector<std::uint32_t> match_of_node;  // empty when there are no parts
  std::vector<std::uint32_t> leader;         // the node whose task a node runs in; no_node: on another process's rank
  std::vector<std::uint32_t> task_nodes;     // the leaders, ascending
  std::vector<std::uint32_t> pred_begin;     // by node, for leaders: predecessors, as leaders
  std::vector<std::uint32_t> preds;
  std::vector<bool> waits;  // by node; empty when no lane waits
  std::size_t num_waiting_lanes = 0;
  std::string waiting_lanes;  // their names
};

// Throws Error(graph) when parts do not match or the tasks would wait for each other in a circle.
// `edges`: the graph's own, or a memory plan's.
[[nodiscard]] Lowering lower(const Graph& graph, const Edges& edges, const World& world);

// All nodes of this process, each after those whose tasks come before its own, parts that meet beside each other: by
// `position` (a memory plan's) where that leaves a choice, then in the order of adding.
[[nodiscard]] std::vector<std::uint32_t> issue_order(const Lowering& lowering, std::span<const std::uint32_t> position);

}  // namespace stepgraph
