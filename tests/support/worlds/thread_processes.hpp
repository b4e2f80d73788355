#pragma once
#include <functional>
#include <vector>

#include "engine/graph/rank_set.hpp"
#include "engine/run/world.hpp"

namespace stepgraph::testing {

// How the processes of a job, which are threads here, exchange the data of parts.
enum class Exchanges { hub, messages };

// All ranks, dealt to processes as neighbours: as equally as possible, the first processes have one more.
[[nodiscard]] std::vector<RankSet> neighbours(int num_ranks, int num_processes);

// Calls `process` in each process of a job, with its world, which has peers. If one throws, calls of the others to
// their peers end, and so do their communications in the same run. Throws the first error.
void in_processes(const std::vector<RankSet>& processes, Exchanges exchanges,
                  const std::function<void(World& world)>& process);

}  // namespace stepgraph::testing
