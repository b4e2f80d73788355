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

// Who comes before whom inside a rank, computed from the edges alone: for each node, how far each lane of its rank has
// come. Sound only where lanes are chains, which is checked on the way.
class Order {
 public:
  Order(const Graph& graph, const Edges& edges, Findings& findings);

  [[nodiscard]] bool acyclic() const noexcept { return acyclic_; }

  // A place for each node in some order that the edges allow.
  [[nodiscard]] std::vector<std::uint32_t> places() const;

  // Readies the questions about one node: `follows(a)` asks whether `a` has ended before it starts.
  void ask_about(Instance node);
  [[nodiscard]] bool follows(Instance a);

 private:
  using Clock = std::array<std::uint32_t, num_lane_kinds>;  // nodes of each lane that come before, itself included

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
  std::vector<std::uint32_t> sorted_;    // empty when the order of adding is one
  std::vector<std::int8_t> lane_;        // -1: none
  std::vector<std::uint32_t> position_;  // on its lane
  std::vector<Clock> first_;             // of the first run's lanes, for nodes of the first run
  std::vector<Clock> second_;            // of the first run's lanes, for nodes of the second run

  Instance asked_{0, false};
  std::vector<std::uint32_t> direct_stamp_;   // predecessors of `asked_`, by question number
  std::vector<std::uint32_t> visited_stamp_;  // 2 per node: first and second run
  std::uint32_t question_ = 0, search_ = 0;
};

}  // namespace stepgraph::verifier
