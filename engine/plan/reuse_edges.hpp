#pragma once
#include <cstdint>
#include <vector>

#include "engine/plan/memory_plan.hpp"
#include "engine/plan/tenants.hpp"

namespace stepgraph {

// Fills `edges` with the graph's edges plus reuse edges: for each succession, every access of the old tenant comes
// before every access of the new one. Edges that others imply are left out. Returns the edges added. `turns` is
// MemoryPlan::turns.
std::vector<ReuseEdge> add_reuse_edges(const Graph& graph, const std::vector<std::uint32_t>& turns,
                                       const std::vector<Tenant>& tenants, const std::vector<Succession>& successions,
                                       Edges& edges);

}  // namespace stepgraph
