#pragma once
#include <memory>

#include "engine/graph/graph.hpp"
#include "engine/graph/issue_order.hpp"
#include "engine/graph/ordered_graph.hpp"
#include "engine/plan/memory_plan.hpp"

namespace stepgraph {

class World;  // engine/run/world.hpp

// A graph that is ready to run: the graph, where its buffers lie, and all edges that an executor obeys. These are the
// edges derived from accesses, the reuse edges of the memory plan, and the order in which the world needs
// communications to start. Lowering adds no edge to them.
//
//   sg::RunnableGraph runnable(graph, world, {.reuse = sg::Reuse::tight});
//   sg::verify(runnable);
//   sg::write_dot(runnable, "step.dot");
//   executor.run(sg::Program(runnable, world));
//
// Converts to OrderedGraph and to Graph, so it can be passed to every function that takes one of them. Shares the
// graph's storage. Immutable; copies are cheap and share the plan.
class RunnableGraph {
 public:
  // Each buffer has bytes of its own.
  RunnableGraph(const Graph& graph, const World& world);
  // Buffers share arenas: plan_memory with these options, and the issue order and the workspaces of the world.
  RunnableGraph(const Graph& graph, const World& world, MemoryPlanOptions options);
  // With a plan that was made before, for the same graph and the issue order that a world needs. Throws Error(config)
  // when the plan is for another graph or its edges lack some of the graph's or of its own reuse edges.
  RunnableGraph(const Graph& graph, MemoryPlan plan);

  [[nodiscard]] const Graph& graph() const noexcept { return graph_; }
  [[nodiscard]] const Edges& edges() const;
  [[nodiscard]] const MemoryPlan* memory() const noexcept { return memory_.get(); }  // null: no plan
  [[nodiscard]] IssueOrder issue_order() const noexcept { return issue_order_; }

  operator OrderedGraph() const;                             // NOLINT: implicit on purpose
  operator const Graph&() const noexcept { return graph_; }  // NOLINT: likewise

  // Throws Error(config) when the world has another number of ranks or needs an issue order that the edges lack.
  void check_fits(const World& world) const;

 private:
  Graph graph_;
  IssueOrder issue_order_;
  std::shared_ptr<const MemoryPlan> memory_;  // null: no plan
  std::shared_ptr<const Edges> edges_;        // null: the plan's, else the graph's own
};

}  // namespace stepgraph
