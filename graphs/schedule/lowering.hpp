#pragma once
#include "graphs/schedule/schedule.hpp"

namespace stepgraph {

// Passes: each returns a new schedule with more actions and leaves the given one as it is. In the order in which
// torch.distributed.pipelining applies them: with_unshard, with_reduce_grad, with_send_recv. A schedule that cannot run
// is refused as by `validate`; one that has the actions already, with Error(config).

// A SEND after every action whose result another rank needs, and its RECV on that rank at the place where the row then
// is when ranks take turns, one action each. Sends and receives of all ranks so follow one order in time: they meet in
// the order in which they are issued, and neither receives that block nor sends that wait for their receiver hang.
[[nodiscard]] PipelineSchedule with_send_recv(const PipelineSchedule& schedule);

// UNSHARD and RESHARD around the use of a stage's weights: before each action the weights of the `max_active` stages
// that the rank uses next are there, others are dropped.
[[nodiscard]] PipelineSchedule with_unshard(const PipelineSchedule& schedule, int max_active = 3);

// REDUCE_GRAD after each stage's last W or B.
[[nodiscard]] PipelineSchedule with_reduce_grad(const PipelineSchedule& schedule);

}  // namespace stepgraph
