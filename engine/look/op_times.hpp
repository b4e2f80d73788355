#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/graph/timeline.hpp"

// How long each op takes, and its rates, from a measured or simulated timeline. Both functions throw Error(config) when
// the timeline is of another graph.
namespace stepgraph {

// A node that ran, or parts that ran as one task: then the node of the first member or of the sender, and the sum of
// their costs.
struct TaskTime {
  Node node          = {};
  double flops       = 0;
  double bytes_moved = 0;
  double begin_s     = 0;
  double end_s       = 0;
  double own_s       = 0;  // its part of the time: while n tasks run, each has 1/n of it
  // The average share of the other workers that could help it: those without a task are shared out equally to the tasks
  // that run, as the simulator does. 0: each has a task; 1: none has one.
  double helped_share = 0;
  [[nodiscard]] double seconds() const noexcept { return end_s - begin_s; }
};
[[nodiscard]] std::vector<TaskTime> task_times(const Graph& graph, const Timeline& timeline, int num_workers);

// All tasks of one op together.
struct OpTime {
  std::string op          = {};  // the kind of a node that has no op
  NodeKind kind           = NodeKind::compute;
  std::uint32_t num_tasks = 0;
  double seconds          = 0;  // summed over workers
  double own_s            = 0;  // summed over all ops, the time in which a task runs
  double flops            = 0;
  double bytes_moved      = 0;
};
[[nodiscard]] std::vector<OpTime> op_times(const Graph& graph, const Timeline& timeline);  // longest first

}  // namespace stepgraph
