#pragma once
#include <concepts>

#include "engine/run/world.hpp"

namespace stepgraph {

// All ranks in this process: the reference world, and the one that tests use. A communication is one task over the
// memory of all members, in rank order. No worker ever waits, so hundreds of ranks run on two threads.
class LoopbackWorld final : public World {
 public:
  explicit LoopbackWorld(int num_ranks);
  // Takes the number of ranks from a layout, or from any type with num_ranks().
  template <class Ranked>
  requires requires(const Ranked& ranked) {
    { ranked.num_ranks() } -> std::convertible_to<int>;
  }
  explicit LoopbackWorld(const Ranked& ranked) : LoopbackWorld(ranked.num_ranks()) {}

  [[nodiscard]] int num_ranks() const override { return num_ranks_; }
  [[nodiscard]] bool waits(LaneKind kind) const override { return kind == LaneKind::disk; }
  [[nodiscard]] IssueOrder issue_order() const override { return IssueOrder::any; }
  void communicate(const Context& context, const Exchange& exchange) override;
  void abort(std::string_view) noexcept override {}

 private:
  int num_ranks_;
};

}  // namespace stepgraph
