#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "engine/run/world.hpp"

namespace stepgraph::testing {

// Connects the ranks of a HubWorld: letters in boxes, and notices of failed steps. All members are thread-safe.
class Hub {
 public:
  explicit Hub(int num_ranks) : num_ranks_(num_ranks) {}

  struct Box {
    std::int64_t step;
    std::string channel;
    Rank from, to;
    friend auto operator<=>(const Box&, const Box&) = default;
  };
  struct Letter {
    std::string about                     = {};  // op and message: both ends must agree
    std::vector<std::byte> bytes          = {};  // all pieces, concatenated
    std::vector<std::int64_t> piece_sizes = {};  // as the sender declared them
    Rank source{-1};                             // permute: the rank whose letter the sender expects
    std::int64_t wanted = 0;                     // bytes that the sender expects back
  };

  [[nodiscard]] int num_ranks() const noexcept { return num_ranks_; }
  void put(const Box& box, Letter letter);
  [[nodiscard]] Letter take(const Box& box);  // blocks; throws Error(backend) once the step has failed on any rank
  void fail(std::int64_t step, std::string_view why);  // the first reason is kept
  void throw_away(Rank to, std::int64_t before_step);  // removes letters that no rank will take

 private:
  int num_ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Box, std::deque<Letter>> boxes_;
  std::map<std::int64_t, std::string> failed_;
};

// One process of a world: one rank or several, with a World, an Executor and a slice of its own. Only bytes in letters
// travel between ranks. The simplest correct world, and an example of one outside the library: the first member of a
// group gathers the inputs of a collective, computes the outputs in group order, and sends them back. Letters name
// their group and their turn, so they may come in any order.
class HubWorld : public World {
 public:
  HubWorld(Hub& hub, RankSet ranks, Peers* peers = nullptr) : hub_(hub), ranks_(std::move(ranks)), peers_(peers) {}

  [[nodiscard]] int num_ranks() const override { return hub_.num_ranks(); }
  [[nodiscard]] RankSet local_ranks() const override { return ranks_; }
  [[nodiscard]] bool waits(LaneKind kind) const override;
  [[nodiscard]] IssueOrder issue_order() const override { return IssueOrder::any; }
  [[nodiscard]] Peers* peers() override { return peers_; }
  void begin_step(std::shared_ptr<const RunView> run) override;
  void communicate(const Context& context, const Exchange& exchange) override;
  void abort(std::string_view why) noexcept override;

 private:
  [[nodiscard]] Hub::Box box(const Exchange& exchange, const char* use, Rank from, Rank to) const;

  Hub& hub_;
  RankSet ranks_;
  Peers* peers_;
  std::int64_t step_ = 0;  // written between steps only
};

// Runs `process(ranks)` for every process, each on its own thread, and returns the results.
[[nodiscard]] std::vector<std::vector<std::string>> on_every_process(
    const std::vector<RankSet>& processes, const std::function<std::vector<std::string>(const RankSet&)>& process);

}  // namespace stepgraph::testing
