#include <algorithm>
#include <queue>
#include <utility>
#include <vector>

#include "engine/plan/memory_plan.hpp"
#include "engine/run/streams.hpp"

namespace stepgraph {
namespace {

// All nodes, each after the nodes that it follows; of those that could be next, the first in the order of the plan. A
// program on a device issues them so.
std::vector<std::uint32_t> issued(const Graph& graph, const MemoryPlan& plan) {
  const std::uint32_t num_nodes = graph.num_nodes();
  std::vector<std::vector<std::uint32_t>> after(num_nodes);
  std::vector<std::uint32_t> waits_for(num_nodes, 0), order;
  const auto later = [&](std::uint32_t a, std::uint32_t b) {
    return plan.turns[a] == plan.turns[b] ? a > b : plan.turns[a] > plan.turns[b];
  };
  std::priority_queue<std::uint32_t, std::vector<std::uint32_t>, decltype(later)> ready(later);
  for (std::uint32_t node = 0; node < num_nodes; ++node) {
    const auto before = plan.edges.before(Node{node});
    for (const std::uint32_t each : before) after[each].push_back(node);
    waits_for[node] = static_cast<std::uint32_t>(before.size());
    if (before.empty()) ready.push(node);
  }
  while (!ready.empty()) {
    const std::uint32_t node = ready.top();
    ready.pop();
    order.push_back(node);
    for (const std::uint32_t next : after[node]) {
      if (--waits_for[next] == 0) ready.push(next);
    }
  }
  return order;
}

}  // namespace

Edges stream_edges(const Graph& graph, const MemoryPlan& plan, const WorkspaceNeeds& needs) {
  const StreamPlan streams = plan_streams({graph, plan}, issued(graph, plan), needs);
  // By node: the node before it on its stream.
  std::vector<std::uint32_t> before(graph.num_nodes(), StreamPlan::none);
  std::vector<std::uint32_t> last(graph.ranks().size() * num_lane_kinds, StreamPlan::none);
  for (const std::uint32_t node : streams.issue_order) {
    if (streams.stream[node] == StreamPlan::none) continue;
    before[node] = std::exchange(last[streams.stream[node]], node);
  }
  Edges edges = plan.edges;
  edges.preds.clear();
  edges.pred_begin.assign(1, 0);
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    const auto planned = plan.edges.before(Node{node});
    std::vector<std::uint32_t> all(planned.begin(), planned.end());
    if (before[node] != StreamPlan::none) all.push_back(before[node]);
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    edges.preds.insert(edges.preds.end(), all.begin(), all.end());
    edges.pred_begin.push_back(static_cast<std::uint32_t>(edges.preds.size()));
  }
  return edges;
}

}  // namespace stepgraph
