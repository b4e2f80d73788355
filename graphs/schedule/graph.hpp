#pragma once
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/simulate/machine.hpp"
#include "graphs/schedule/schedule.hpp"

namespace stepgraph {

// One rank's times for one microbatch, in any unit: forward, input gradient, weight gradient, and one transfer to a
// neighbour. A rank with V stages takes 1/V of F, I and W for each; B takes I + W. A transfer takes COMM
// after the action that made its data has ended, and does not delay compute actions. Stages of one rank need no
// transfer.
struct Costs {
  double F = 1, I = 1, W = 1, COMM = 0;
  friend bool operator==(const Costs&, const Costs&) = default;
};

// The costs of each stage, from one entry for all ranks, one for each rank (divided over the rank's stages), or one for
// each stage. Throws Error(config) for any other number, or a cost that is
// negative, not finite, or all 0.
[[nodiscard]] std::vector<Costs> stage_costs(const PipelineSchedule& schedule, const std::vector<Costs>& costs);

// A schedule as a graph: what `verify` proves, `simulate` times and write_dot draws.
struct ScheduleGraph {
  Graph graph;
  std::vector<std::vector<Node>> nodes = {};  // [rank][position in the schedule's row]
};

// Compute actions are nodes on their ranks' compute lanes, costing as many flops as they take time. Transfers are
// messages without a lane, so that none queues behind another; neighbouring stages have a communicator for each
// direction. Tokens carry the dependencies: a stage's output, the gradient of its input, and what came of them on
// another rank. UNSHARD and RESHARD are nodes on the gather lane, REDUCE_GRAD on the reduce lane; they take no time.
//
// A schedule without transfers gets them (with_send_recv); one that cannot run is refused as by `validate`. Costs are
// as stage_costs takes them.
[[nodiscard]] ScheduleGraph schedule_graph(const PipelineSchedule& schedule, const std::vector<Costs>& costs);

// The machine on which that graph takes the time it costs: a flop is a unit of time.
[[nodiscard]] Machine schedule_machine(int num_ranks);

}  // namespace stepgraph
