#pragma once
#include <cstdint>
#include <vector>

#include "engine/memory_plan.hpp"
#include "engine/tenants.hpp"

namespace stepgraph {

// The graph's edges and those that the successions need: everything that touches the old tenant before everything that
// touches the new one. What is implied already is left out. With `loop_only`, the graph is known to order tenants
// inside a run, and only edges into the next run are added. Returns the edges added.
std::vector<ReuseEdge> add_reuse_edges(const Graph& graph, const std::vector<std::uint32_t>& position,
                                       const std::vector<Tenant>& tenants, const std::vector<Succession>& successions,
                                       Edges& edges);

}  // namespace stepgraph
