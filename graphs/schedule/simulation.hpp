#pragma once
#include <vector>

#include "engine/graph/timeline.hpp"
#include "graphs/schedule/graph.hpp"
#include "graphs/schedule/schedule.hpp"

namespace stepgraph {

struct ScheduleTimeline {
  std::vector<std::vector<NodeTime>> rows = {};  // [rank][position in the schedule's row]: begin and end
  double makespan                         = 0;   // end of the last action
  double longest_span                     = 0;  // over ranks: from a rank's first compute action to the end of its last
  // (longest span - work) / longest span, where work is what the busiest rank computes: the paper's rate (Zero Bubble,
  // ICLR 2024), which does not count a rank's wait for its first input, nor that for others after its last action.
  double bubble_rate                  = 0;
  double efficiency                   = 0;   // share of the time of all ranks in which they compute
  std::vector<double> peak_activation = {};  // [rank]: in microbatches of one rank
};

struct ScheduleCosts {
  std::vector<Costs> costs = {Costs{}};  // one for all ranks, one for each rank, or one for each stage
  double retain            = 1;          // the share of activations that W needs: kept from the end of I to that of W
};

// The engine's simulator on the schedule's graph. Throws as schedule_graph does.
[[nodiscard]] ScheduleTimeline simulate(const PipelineSchedule& schedule, const ScheduleCosts& costs);

// The peak of each rank's activations. One rank's microbatch counts 1; a stage of a rank with V stages counts 1/V. They
// are allocated when F starts. The share `retain` is kept after the end of I and freed at the end of W or B. A rank
// does one action at a time, so the result depends on the order of actions alone.
[[nodiscard]] std::vector<double> peak_activations(const PipelineSchedule& schedule, double retain = 1);

}  // namespace stepgraph
