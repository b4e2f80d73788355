#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// How many bytes of workspace nodes need: memory of a stream for data between the kernels of one node
// (DeviceQueue::workspace in engine/run/device.hpp). By default none, as for ranks on the host.
struct WorkspaceNeeds {
  bool bodies = false;  // bodies run on a device: NodeSpec::workspace_bytes
  // What the world needs for a part: World::part_workspace. Empty: nothing.
  std::function<std::int64_t(const Graph& graph, Node part)> part = {};

  [[nodiscard]] std::int64_t of(const Graph& graph, Node node) const;
};

// The workspace of one stream. The nodes of a stream run one after another, so they share it: it is as large as the
// largest need among them. Parts that are issued together run together: their needs are added.
struct WorkspacePlan {
  Rank rank               = {};
  LaneKind lane           = LaneKind::compute;
  std::int64_t size_bytes = 0;
  Node node               = {};  // that needs so much; of several, the first
};

// By rank, then lane; without empty ones. A node without a lane that needs workspace counts on its rank's compute lane.
[[nodiscard]] std::vector<WorkspacePlan> plan_workspaces(const Graph& graph, const WorkspaceNeeds& needs);

}  // namespace stepgraph
