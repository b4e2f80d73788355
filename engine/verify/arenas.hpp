#pragma once
#include "engine/plan/memory_plan.hpp"
#include "engine/verify/order.hpp"

namespace stepgraph::verifier {

// Finds pairs of buffers that share arena bytes while no path orders the accesses of one before the accesses of the
// other, within a run and between consecutive runs. Shares no code with the planner.
void check_arenas(const Graph& graph, const MemoryPlan& plan, Order& order, Findings& findings);

}  // namespace stepgraph::verifier
