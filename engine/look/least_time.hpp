#pragma once
#include <optional>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/graph/ordered_graph.hpp"
#include "engine/graph/timeline.hpp"

namespace stepgraph {

// A lower bound of the time of a step: that of the lane that is busy longest, or the sum over two phases.
//
// Any node divides a step into two phases. The nodes that come before it have ended when it begins, and the nodes that
// come after it begin when it has ended. So the step takes at least as long as the busiest lane of the first phase, the
// node, and the busiest lane of the second phase together.
struct LeastTime {
  struct Phase {
    Rank rank{};
    // None: the rank's nodes without a lane, together; in a bound of two phases: the node between, which has no lane.
    std::optional<LaneKind> lane                       = {};
    double busy_s                                      = 0;
    friend bool operator==(const Phase&, const Phase&) = default;
  };
  double seconds = 0;
  // In the order of time; `seconds` is their sum. The node between two phases belongs to that of its lane; if it is on
  // another lane, it is a phase of its own. None: the graph has no nodes.
  std::vector<Phase> phases   = {};
  std::optional<Node> between = {};
};

// The largest of these bounds, over all lanes and all nodes; of equal ones the first, lanes before nodes.
//
// Nodes take the time that they take in the timeline. So the bound is never above the makespan, and it holds for every
// order of nodes that has these edges and these times, with two exceptions:
// - If nodes slow each other down, it does not hold for a step in which other nodes run at the same time.
// - The bound can be that of a rank's nodes without a lane (one phase, `lane` none, no `between`): the time in which at
//   least one of them runs in this timeline. It holds for other orders only if the machine runs these nodes one at a
//   time, as device_machine and a measured GPU do.
//
// Each rank is looked at by itself. The time before and after a node is that of lanes: nodes without a lane do not
// count there. The node itself counts, on a lane or not. Nodes that did not run take no time. The edges must imply the
// order of the lanes, as those of every Graph do.
//
// Linear in the number of edges, apart from busy_lanes. Throws Error(config) when the timeline is of another graph, and
// Error(graph) when an edge leads to another rank or edges lead in a circle.
[[nodiscard]] LeastTime least_time(const OrderedGraph& graph, const Timeline& timeline);

}  // namespace stepgraph
