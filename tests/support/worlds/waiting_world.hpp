#pragma once
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <thread>

#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "engine/run/world.hpp"

namespace stepgraph::testing {

// A world whose communication, host and disk lanes block, like those of a process world. With `only`, just that rank is
// local and its peers never answer: its parts wait until the step stops.
class WaitingWorld final : public World {
 public:
  explicit WaitingWorld(int num_ranks, std::optional<Rank> only = {}) : num_ranks_(num_ranks), only_(only) {}

  [[nodiscard]] int num_ranks() const override { return num_ranks_; }
  [[nodiscard]] RankSet local_ranks() const override { return only_ ? RankSet(*only_) : RankSet::all(num_ranks_); }
  [[nodiscard]] bool waits(LaneKind kind) const override { return kind != LaneKind::compute; }
  [[nodiscard]] IssueOrder issue_order() const override { return IssueOrder::per_communicator; }
  void begin_step(std::shared_ptr<const RunView>) override { aborted_ = false; }
  void communicate(const Context& context, const Exchange&) override {
    ++entered_;
    while (!aborted_ && !context.stopping()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    throw Error(ErrorKind::backend, "aborted");
  }
  void abort(std::string_view) noexcept override {
    aborted_ = true;
    ++aborts_;
  }
  [[nodiscard]] std::optional<std::string> failure() const override {
    if (peer_failed_) return "rank 1 is gone";
    return std::nullopt;
  }
  void fail_peer() { peer_failed_ = true; }
  [[nodiscard]] int aborts() const { return aborts_; }
  [[nodiscard]] int entered() const { return entered_; }  // parts that have begun to wait

 private:
  int num_ranks_;
  std::optional<Rank> only_;
  std::atomic<bool> aborted_{false}, peer_failed_{false};
  std::atomic<int> aborts_{0}, entered_{0};
};

}  // namespace stepgraph::testing
