#include "engine/plan/workspaces.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/graph/graph_data.hpp"
#include "engine/plan/node_workspaces.hpp"

namespace stepgraph {
namespace {

std::size_t workspace_lane(const NodeRecord& node) {
  if (node.lane >= 0) return GraphData::lane_index(node);
  return GraphData::lane_index(node.place, static_cast<std::size_t>(LaneKind::compute));
}

}  // namespace

std::int64_t WorkspaceNeeds::of(const Graph& graph, Node node) const {
  if (!graph.has_part(node)) return bodies ? graph.workspace_bytes(node) : 0;
  const std::int64_t bytes = part ? part(graph, node) : 0;
  if (bytes < 0 || bytes > Graph::most_bytes)
    throw Error(ErrorKind::config, str("plan: ", graph.describe(node), " would need ", bytes,
                                       " bytes of workspace (0 to ", Graph::most_bytes, ")"));
  return bytes;
}

std::vector<NodeWorkspace> node_workspaces(const Graph& graph, const WorkspaceNeeds& needs) {
  const GraphData& data = graph.data();
  std::vector<NodeWorkspace> all;
  if (needs.bodies) {
    for (const WorkspaceRecord& of : data.workspaces)
      all.push_back({.node = {of.node}, .offset_bytes = 0, .size_bytes = of.bytes});
  }
  if (needs.part) {
    std::map<std::pair<std::size_t, std::int32_t>, std::int64_t> ends;  // by lane and issue position
    for (const PartRecord& part : data.parts) {
      const std::int64_t bytes = needs.of(graph, {part.node});
      if (bytes == 0) continue;
      std::int64_t& end = ends[{workspace_lane(data.nodes[part.node]), part.issue}];
      all.push_back({.node = {part.node}, .offset_bytes = end, .size_bytes = bytes});
      end += (bytes + NodeWorkspace::alignment - 1) / NodeWorkspace::alignment * NodeWorkspace::alignment;
      if (end > Graph::most_bytes)
        throw Error(ErrorKind::config,
                    str("plan: ", graph.describe(Node{part.node}), " and the parts issued with it need ", end,
                        " bytes of workspace (at most ", Graph::most_bytes, ")"));
    }
  }
  std::sort(all.begin(), all.end(),
            [](const NodeWorkspace& a, const NodeWorkspace& b) { return a.node.id < b.node.id; });
  return all;
}

std::vector<WorkspacePlan> plan_workspaces(const Graph& graph, const WorkspaceNeeds& needs) {
  const GraphData& data = graph.data();
  std::vector<WorkspacePlan> by_lane(data.num_lanes());
  for (const NodeWorkspace& of : node_workspaces(graph, needs)) {
    const NodeRecord& node = data.nodes[of.node.id];
    const std::size_t lane = workspace_lane(node);
    if (of.end() <= by_lane[lane].size_bytes) continue;
    by_lane[lane] = {.rank       = Rank{node.rank},
                     .lane       = static_cast<LaneKind>(lane % num_lane_kinds),
                     .size_bytes = of.end(),
                     .node       = of.node};
  }
  std::erase_if(by_lane, [](const WorkspacePlan& plan) { return plan.size_bytes == 0; });
  return by_lane;
}

}  // namespace stepgraph
