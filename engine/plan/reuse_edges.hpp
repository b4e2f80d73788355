#pragma once
#include <cstdint>
#include <vector>

#include "engine/plan/memory_plan.hpp"
#include "engine/plan/tenants.hpp"

namespace stepgraph {

// Adds the edges that the successions need: from every node that touches the old tenant to every node that touches the
// new one. Edges that `edges` imply already are left out. Returns the added ones.
std::vector<ReuseEdge> add_reuse_edges(const Graph& graph, const std::vector<std::uint32_t>& position,
                                       const std::vector<Tenant>& tenants, const std::vector<Succession>& successions,
                                       Edges& edges);

}  // namespace stepgraph
