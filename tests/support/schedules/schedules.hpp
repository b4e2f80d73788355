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
// code with the engine or with the search. Rows are as long as they could be executed, shorter if ranks wait for each
// other. Costs are one for all ranks, one for each rank, or one for each stage, as ScheduleCosts has them.
[[nodiscard]] std::vector<std::vector<NodeTime>> reference_times(const PipelineSchedule& schedule,
                                                                 const std::vector<Costs>& costs);

// What ScheduleTimeline has, from reference_times alone. Peaks are those of the activations over time: allocated at the
// begin of F; the share `retain` is freed at the end of W, the rest at the end of I.
struct ReferenceResult {
  bool complete       = false;  // false: ranks wait for each other; nothing else is set then
  double longest_span = 0, makespan = 0, bubble_rate = 0;
  std::vector<double> peak_activation = {};  // [rank]
};
[[nodiscard]] ReferenceResult reference_result(const PipelineSchedule& schedule, const std::vector<Costs>& costs,
                                               double retain = 1);

}  // namespace stepgraph::testing
