#include "engine/run/runnable_graph.hpp"

#include <algorithm>
#include <array>
#include <string_view>

#include "engine/base/error.hpp"
#include "engine/run/world.hpp"

namespace stepgraph {
namespace {

MemoryPlan plan_for(const Graph& graph, const World& world, MemoryPlanOptions options) {
  options.issue_order = world.issue_order();
  options.workspaces  = workspace_needs(world);
  return plan_memory(graph, options);
}

// The plan is of this graph, and its edges are at least the graph's and its reuse edges. Whether they are enough is
// what `verify` proves.
void check(const Graph& graph, const MemoryPlan& plan) {
  if (plan.offsets.size() != graph.num_buffers() ||
      plan.edges.pred_begin.size() != std::size_t{graph.num_nodes()} + 1) {
    throw Error(ErrorKind::config, str("program: the plan is for ", plan.offsets.size(), " buffers and ",
                                       plan.turns.size(), " nodes, the graph has ", graph.num_buffers(), " and ",
                                       graph.num_nodes(), " (plan the graph that runs)"));
  }
  const auto refuse = [&](Node node, const char* missing) {
    throw Error(ErrorKind::config, str("program: the plan's edges into ", graph.describe(node), " lack ", missing));
  };
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    const auto own = graph.edges().before({node}), planned = plan.edges.before({node});
    if (!std::includes(planned.begin(), planned.end(), own.begin(), own.end()))
      refuse({node}, "edges of the graph: the plan is for another graph (plan the graph that runs)");
  }
  for (const ReuseEdge& edge : plan.reuse_edges) {
    if (edge.loop) continue;
    const auto planned = plan.edges.before(edge.after);
    if (!std::binary_search(planned.begin(), planned.end(), edge.before.id))
      refuse(edge.after, "a reuse edge of the plan");
  }
}

std::string_view name(IssueOrder order) {
  constexpr std::array<std::string_view, 3> names{"any", "per communicator", "per rank"};
  return names[static_cast<std::size_t>(order)];
}

}  // namespace

RunnableGraph::RunnableGraph(const Graph& graph, const World& world)
    : graph_(graph), issue_order_(world.issue_order()) {
  if (issue_order_ != IssueOrder::any)
    edges_ = std::make_shared<const Edges>(edges_in_issue_order(graph_, issue_order_));
}

RunnableGraph::RunnableGraph(const Graph& graph, const World& world, MemoryPlanOptions options)
    : RunnableGraph(graph, plan_for(graph, world, options)) {}

RunnableGraph::RunnableGraph(const Graph& graph, MemoryPlan plan)
    : graph_(graph), issue_order_(plan.issue_order), memory_(std::make_shared<const MemoryPlan>(std::move(plan))) {
  check(graph_, *memory_);
}

const Edges& RunnableGraph::edges() const { return memory_ ? memory_->edges : edges_ ? *edges_ : graph_.edges(); }

RunnableGraph::operator OrderedGraph() const {
  return memory_ ? OrderedGraph(graph_, *memory_) : OrderedGraph(graph_, edges());
}

void RunnableGraph::check_fits(const World& world) const {
  if (graph_.num_ranks() != world.num_ranks()) {
    throw Error(ErrorKind::config,
                str("program: the graph is for ", graph_.num_ranks(), " ranks, the world has ", world.num_ranks()));
  }
  if (graph_.ranks() != world.local_ranks()) {
    throw Error(ErrorKind::config,
                str("program: the graph holds ", to_string(graph_.ranks()), ", this process of the world has ",
                    to_string(world.local_ranks()), " (slice(graph, world.local_ranks()))"));
  }
  if (issue_order_ < world.issue_order()) {
    throw Error(ErrorKind::config,
                str("program: the graph's issue order is '", name(issue_order_), "', the world needs '",
                    name(world.issue_order()), "' (make the RunnableGraph for this world)"));
  }
}

}  // namespace stepgraph
