#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "engine/verify/findings.hpp"

namespace stepgraph::verifier {

// A node in the first run of the graph, or in a second run that follows it.
struct Instance {
  std::uint32_t node;
  bool second;
};

// The order of nodes inside each rank, computed from the edges alone: for each node, how far each lane of its rank has
// progressed. Valid only where lanes are chains; the constructor checks that.
class Order {
 public:
  Order(const Graph& graph, const Edges& edges, Findings& findings);

  [[nodiscard]] bool acyclic() const noexcept { return acyclic_; }

  // The position of each node in one topological order.
  [[nodiscard]] std::vector<std::uint32_t> places() const;

  // Selects the node that `follows` is about: `follows(a)` tells whether `a` ends before the selected node starts.
  void ask_about(Instance node);
  [[nodiscard]] bool follows(Instance a);

 private:
  using Clock = std::array<std::uint32_t, num_lane_kinds>;  // per lane: nodes that come before, and itself

  bool sort();
  void report_cycle(const std::vector<std::uint32_t>& waiting);
  void count_lanes();
  void count_lanes_again();
  [[nodiscard]] bool search(Instance a);

  const Graph& graph_;
  const Edges& edges_;
  Findings& findings_;
  bool acyclic_   = false;
  bool has_lanes_ = false;
  std::vector<std::uint32_t> sorted_;    // empty: the order in which nodes were added is topological
  std::vector<std::int8_t> lane_;        // -1: no lane
  std::vector<std::uint32_t> position_;  // on the node's lane
  std::vector<Clock> first_;             // clocks of nodes of the first run
  std::vector<Clock> second_;            // clocks of nodes of the second run, counted in nodes of the first run

  Instance asked_{0, false};
  std::vector<std::uint32_t> direct_stamp_;   // question number at which a node was last a predecessor of `asked_`
  std::vector<std::uint32_t> visited_stamp_;  // two per node: first run, second run
  std::uint32_t question_ = 0, search_ = 0;
};

}  // namespace stepgraph::verifier
