#pragma once
#include "engine/plan/memory_plan.hpp"
#include "engine/verify/order.hpp"

namespace stepgraph::verifier {

// Looks for buffers that share bytes of an arena without an order between those who touch the one and those who touch
// the other, in a run and from one run to the next. Shares no code with the planner.
void check_arenas(const Graph& graph, const MemoryPlan& plan, Order& order, Findings& findings);

}  // namespace stepgraph::verifier
