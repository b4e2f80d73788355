#pragma once
#include "engine/graph/edges.hpp"
#include "engine/graph/graph.hpp"

namespace stepgraph {

struct MemoryPlan;  // engine/plan/memory_plan.hpp

// A graph together with the order in which its nodes run. verify, simulate, write_dot, write_trace, summarize and
// critical_path take this type, so that all of them look at the same edges.
//
// A Graph converts to it with the edges that are derived from its accesses. A RunnableGraph (engine/run/
// runnable_graph.hpp) converts to it with the edges that an executor obeys: the derived edges, the reuse edges of the
// memory plan and the issue order of the world.
//
// A view of three pointers: the graph, the edges and the plan must outlive it. Copy it freely, but do not keep one that
// was made from a temporary: as an argument of a function that is fine, as a variable it would dangle.
struct OrderedGraph {
  OrderedGraph(const Graph& of) : graph(of), edges(of.edges()) {}  // NOLINT: implicit on purpose
  // With other edges than the derived ones, for example to verify or simulate a change. An edge may lead from any node
  // of a rank to any other node of that rank.
  OrderedGraph(const Graph& of, const Edges& order) : graph(of), edges(order) {}
  // In the arenas of a memory plan, with the edges of the plan. Not checked: `verify` finds what is wrong.
  OrderedGraph(const Graph& of, const MemoryPlan& plan);  // in engine/plan/memory_plan.cpp

  const Graph& graph;
  const Edges& edges;
  const MemoryPlan* memory = nullptr;  // null: each buffer has bytes of its own
};

}  // namespace stepgraph
