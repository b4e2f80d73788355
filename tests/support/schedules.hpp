#pragma once
#include <random>
#include <vector>

#include "engine/graph/timeline.hpp"
#include "graphs/schedule/graph.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/schedule.hpp"

namespace stepgraph::testing {

struct ScheduleCase {
  ScheduleKind kind;
  ScheduleSpec spec;
};

// A random kind with ranks, microbatches and chunks for which it is defined. About half of the time there are fewer
// microbatches than ranks.
[[nodiscard]] ScheduleCase random_schedule_case(std::mt19937_64& random, int max_ranks, int max_microbatches);

// The time of each action of a schedule without transfers, by iterating over the rows until nothing changes. Shares no
// code with the engine. Rows are as long as they could be executed, shorter if ranks wait for each other. One cost per
// rank.
[[nodiscard]] std::vector<std::vector<NodeTime>> reference_times(const PipelineSchedule& schedule,
                                                                 const std::vector<Costs>& costs);

}  // namespace stepgraph::testing
