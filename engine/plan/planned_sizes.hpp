#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "engine/plan/memory_plan.hpp"

namespace stepgraph {

// The sizes of a memory plan alone.
struct PlannedSizes {
  std::map<std::pair<Rank, Space>, std::int64_t> arenas = {};  // without empty ones
  std::vector<WorkspacePlan> workspaces                 = {};

  [[nodiscard]] std::int64_t arena(Rank rank, Space space) const;  // 0: no buffers
  [[nodiscard]] std::int64_t device_bytes(Rank rank) const;        // its arena and its workspaces
};

// ArenaPlan::size_bytes of plan_memory(graph, options) in one space, or in all, and its workspaces. Several times
// faster: the other spaces are not packed, there are no offsets and no reuse edges, and one simulation is enough. For
// searches that plan many graphs.
[[nodiscard]] PlannedSizes planned_sizes(const Graph& graph, const MemoryPlanOptions& options = {},
                                         std::optional<Space> only = std::nullopt);

}  // namespace stepgraph
