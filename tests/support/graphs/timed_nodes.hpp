#pragma once
#include "engine/graph/graph.hpp"
#include "engine/simulate/machine.hpp"

namespace stepgraph::testing {

// A node that takes `seconds` at a rate of one flop per second; of rank 0, unless the spec has a rank or a lane.
inline Node timed(Graph& graph, double seconds, NodeSpec spec = {}) {
  spec.cost.flops = seconds;
  if (!spec.lane && !spec.rank) spec.rank = Rank{0};
  return graph.add(spec);
}

// One rank with that rate, whose nodes share a pool of workers.
inline Machine one_pool(int workers, PoolOrder order) {
  Machine machine(1);
  machine.rate(NodeKind::compute, {.flops_per_s = 1});
  machine.bind({}, machine.pool({.name = "cores", .workers = workers, .order = order}));
  return machine;
}

}  // namespace stepgraph::testing
