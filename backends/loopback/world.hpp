#pragma once
#include <concepts>

#include "engine/run/world.hpp"

namespace stepgraph {

// Every rank in this process: the reference world, and the one that tests run on. A communication is one task over all
// its members' memory, in rank order, so nothing ever waits and hundreds of ranks run on two threads.
class LoopbackWorld final : public World {
 public:
  explicit LoopbackWorld(int num_ranks);
  // As many ranks as a layout has, or anything else that counts its ranks.
  template <class Ranked>
  requires requires(const Ranked& ranked) {
    { ranked.num_ranks() } -> std::convertible_to<int>;
  }
  explicit LoopbackWorld(const Ranked& ranked) : LoopbackWorld(ranked.num_ranks()) {}

  [[nodiscard]] int num_ranks() const override { return num_ranks_; }
  [[nodiscard]] bool is_local(Rank) const override { return true; }
  [[nodiscard]] bool waits(LaneKind) const override { return false; }
  [[nodiscard]] IssueOrder issue_order() const override { return IssueOrder::any; }
  void communicate(const Context& context, const Exchange& exchange) override;
  void abort(std::string_view) noexcept override {}

 private:
  int num_ranks_;
};

}  // namespace stepgraph
