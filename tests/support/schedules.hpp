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

// Any kind with ranks, microbatches and chunks for which it is defined: fewer microbatches than ranks as often as not.
[[nodiscard]] ScheduleCase random_schedule_case(std::mt19937_64& random, int max_ranks, int max_microbatches);

// When each action of a schedule without transfers runs, by going over the rows until nothing changes: shares nothing
// with the engine. Rows are as far as they could be done, shorter when ranks wait for each other. One cost per rank.
[[nodiscard]] std::vector<std::vector<NodeTime>> reference_times(const PipelineSchedule& schedule,
                                                                 const std::vector<Costs>& costs);

}  // namespace stepgraph::testing
