#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/graph/timeline.hpp"

// What a timeline says about ops: how long each takes, and at which rates. A measured and a simulated step are judged
// by the same code. Both functions throw Error(config) when the timeline is of another graph.
namespace stepgraph {

// A node that ran, or the parts that met and ran as one: that of the first member, or of the sender, and what they cost
// together.
struct TaskTime {
  Node node           = {};
  double flops        = 0;
  double bytes_moved  = 0;
  double begin_s      = 0;
  double end_s        = 0;
  double others_share = 0;  // of the other workers that ran nodes in that time, on average: 0 none, 1 all of them
  [[nodiscard]] double seconds() const noexcept { return end_s - begin_s; }
};
[[nodiscard]] std::vector<TaskTime> task_times(const Graph& graph, const Timeline& timeline, int num_workers);

// All tasks of one op together.
struct OpTime {
  std::string op          = {};  // of a node without one, its kind
  NodeKind kind           = NodeKind::compute;
  std::uint32_t num_tasks = 0;
  double seconds          = 0;  // summed over workers
  double flops            = 0;
  double bytes_moved      = 0;
};
[[nodiscard]] std::vector<OpTime> op_times(const Graph& graph, const Timeline& timeline);  // longest first

}  // namespace stepgraph
