#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/run/program/running_program.hpp"
#include "engine/run/runnable_graph.hpp"
#include "engine/run/world.hpp"

namespace stepgraph {

// A graph as the tasks of one process, before Taskflow: internal to engine/.
struct Lowering {
  std::vector<Match> matches;
  std::vector<std::uint32_t> match_of_node;  // the first match of the node's task; empty when there are no parts
  std::vector<std::uint32_t> leader;         // the node whose task a node runs in
  std::vector<std::uint32_t> task_nodes;     // the leaders, ascending
  std::vector<std::uint32_t> pred_begin;     // by node, for leaders: predecessors, as leaders
  std::vector<std::uint32_t> preds;
  std::vector<bool> waits;  // by node; empty when no lane waits
  std::vector<Lane> waiting_lanes;
};

// Throws Error(config) when the graph does not fit the world, Error(graph) when parts do not match or tasks would wait
// for each other in a circle.
[[nodiscard]] Lowering lower(const RunnableGraph& graph, const World& world);

// Tells the world about the groups of a program, and sets the communicators of its matches.
void prepare_world(World& world, const Graph& graph, std::vector<Match>& matches);

// All nodes of this process, each after the nodes of the tasks before its own, parts that meet beside each other. Where
// the tasks leave a choice, the order of the memory plan decides (null: no plan), then the order of adding.
[[nodiscard]] std::vector<std::uint32_t> issue_order(const Lowering& lowering, const MemoryPlan* plan);

}  // namespace stepgraph
