#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/verify/verify.hpp"

namespace stepgraph::verifier {

// Collects findings, up to a limit.
class Findings {
 public:
  explicit Findings(std::size_t limit) : limit_(limit) {}
  void add(Flaw flaw, std::string message) {
    if (!full()) list_.push_back({flaw, std::move(message)});
  }
  [[nodiscard]] bool full() const noexcept { return list_.size() >= limit_; }
  [[nodiscard]] std::vector<Finding> take() { return std::move(list_); }

 private:
  std::size_t limit_;
  std::vector<Finding> list_;
};

// Checks inside each rank, for one run of the graph and a second run that follows it: lanes are chains, conflicting
// accesses are ordered, and no node reads bytes that no node wrote. With a plan, also checks buffers that share arena
// bytes. Returns false if the edges of a rank form a cycle; the other checks are then skipped.
bool check_ranks(const Graph& graph, const Edges& edges, const MemoryPlan* plan, Findings& findings);

// Checks across ranks: every part has its counterparts, and they agree. Returns false if any does not.
bool check_parts(const Graph& graph, Findings& findings);

// Checks inside each part: its input and output do not overlap, or coincide where the operation can run in place.
void check_overlaps(const Graph& graph, Findings& findings);

// Checks across ranks: no cycle of waits. Requires that all parts are matched.
void check_deadlock(const Graph& graph, const Edges& edges, Findings& findings);

// The matched parts. Each list is ordered by group member; for a message: the sender, then the receiver.
[[nodiscard]] std::vector<std::vector<std::uint32_t>> meetings(const Graph& graph);

}  // namespace stepgraph::verifier
