#pragma once
#include <cstdint>
#include <vector>

#include "engine/plan/memory_plan.hpp"
#include "engine/plan/tenants.hpp"

namespace stepgraph {

// The graph's edges and those that the successions need: everything that touches the old tenant before everything that
// touches the new one. What is implied already is left out. `edges` gets all of them; returns those added.
std::vector<ReuseEdge> add_reuse_edges(const Graph& graph, const std::vector<std::uint32_t>& position,
                                       const std::vector<Tenant>& tenants, const std::vector<Succession>& successions,
                                       Edges& edges);

}  // namespace stepgraph
