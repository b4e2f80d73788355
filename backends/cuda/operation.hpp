#pragma once
#include "engine/run/world.hpp"

namespace stepgraph::cuda {

// Enqueues one communication whose members are all in this process. The first member's stream does the work, after all
// members' streams have reached it. The other streams continue when it is done.
void communicate(const Exchange& exchange);

}  // namespace stepgraph::cuda
