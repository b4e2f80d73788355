#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/verify/verify.hpp"

namespace stepgraph::verifier {

// What was found so far.
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

// Inside each rank: lanes are chains, conflicting accesses are ordered, nothing reads what nobody wrote, in one run of
// the graph and in a second run that follows it. False: the edges of a rank form a cycle, and nothing else was checked.
// Given a plan, the same for tenants of its arenas.
bool check_ranks(const Graph& graph, const Edges& edges, const MemoryPlan* plan, Findings& findings);

// Across ranks: parts meet and agree. False: some do not.
bool check_parts(const Graph& graph, Findings& findings);

// Inside each part: what it reads and what it writes are apart, or the same where its operation can be done in place.
void check_overlaps(const Graph& graph, Findings& findings);

// Across ranks: nobody waits in a circle. Needs parts that meet.
void check_deadlock(const Graph& graph, const Edges& edges, Findings& findings);

// The parts that meet, each list by member; for a message the sender, then the receiver.
[[nodiscard]] std::vector<std::vector<std::uint32_t>> meetings(const Graph& graph);

}  // namespace stepgraph::verifier
