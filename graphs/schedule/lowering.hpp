#pragma once
#include "graphs/schedule/schedule.hpp"

namespace stepgraph {

// Passes: each returns a new schedule with more actions and leaves the given one as it is. In the order in which
// torch.distributed.pipelining applies them: with_unshard, with_reduce_grad, with_send_recv. A schedule that cannot run
// is refused as by `validate`; one that has the actions already, with Error(config).

// Adds a SEND after every action that makes data for another rank. F, I and W take a unit of time, B takes two; the
// RECV goes where the receiving rank's row then is. So sends and receives of all ranks follow one order in time: they
// match in the order in which they are issued, and the schedule cannot hang, even where receives block or sends wait
// for their receiver. A queue of receives waits for no message that comes later than the one behind it, as long as
// actions take about as long.
[[nodiscard]] PipelineSchedule with_send_recv(const PipelineSchedule& schedule);

// Adds UNSHARD and RESHARD around the uses of a stage's weights: before each action the weights of the `max_active`
// stages that the rank uses next are gathered, and others are dropped.
[[nodiscard]] PipelineSchedule with_unshard(const PipelineSchedule& schedule, int max_active = 3);

// Adds REDUCE_GRAD after each stage's last W or B.
[[nodiscard]] PipelineSchedule with_reduce_grad(const PipelineSchedule& schedule);

}  // namespace stepgraph
