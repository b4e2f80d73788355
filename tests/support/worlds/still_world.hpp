#pragma once
#include "engine/run/world.hpp"

namespace stepgraph::testing {

// A world in which all ranks are local and communication moves no bytes: for tests of order and time, with any types.
class StillWorld final : public World {
 public:
  explicit StillWorld(int num_ranks) : num_ranks_(num_ranks) {}
  [[nodiscard]] int num_ranks() const override { return num_ranks_; }
  [[nodiscard]] bool waits(LaneKind) const override { return false; }
  [[nodiscard]] IssueOrder issue_order() const override { return IssueOrder::any; }
  void communicate(const Context&, const Exchange&) override {}
  void abort(std::string_view) noexcept override {}

 private:
  int num_ranks_;
};

}  // namespace stepgraph::testing
