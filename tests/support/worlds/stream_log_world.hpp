#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/plan/memory_plan.hpp"
#include "engine/run/device.hpp"
#include "engine/run/streams.hpp"
#include "engine/run/world.hpp"

// A device that executes nothing and writes down what it is asked for, as CUDA would understand it: a stream does its
// work in order, a wait is for the latest record of an event at the time of the call, and the host sees that a stream
// has come somewhere only where it waits for an event. What happens before what follows from these rules alone: no code
// of the planner, of its proof or of the edges is used.
namespace stepgraph::testing {

// Steps of a log, each after the steps that it happens after.
class HappensBefore {
 public:
  std::uint32_t add(const std::vector<std::uint32_t>& after);
  [[nodiscard]] std::uint32_t size() const { return static_cast<std::uint32_t>(before_.size()); }
  [[nodiscard]] bool ordered(std::uint32_t a, std::uint32_t b) const;  // a happens before b, or is b

 private:
  std::vector<std::vector<std::uint64_t>> before_;  // by step: one bit for each step before it, and its own
};

class StreamLog {
 public:
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  // `issue_order`: what the world asks for, any or per_rank.
  StreamLog(const Graph& graph, StreamPlan plan, IssueOrder issue_order);
  void begin_run();
  void enter(Node node);                      // its waits; a host node: the host waits, and the node begins
  void work(const std::vector<Node>& nodes);  // enqueued on the streams of all nodes, as one; they meet
  void leave(Node node);

  // The first pair of nodes that must have an order and has none, in one run or from one run to the next; empty: none.
  // They must have one if they are on one lane, use the same byte and one of them writes it, or use buffers that share
  // memory; with IssueOrder::per_rank also if they are parts with different issue positions. `num_pairs`: how many were
  // looked at.
  [[nodiscard]] std::string find_unordered(const MemoryPlan& memory, int* num_pairs = nullptr) const;

 private:
  // When a node began and ended in a run.
  struct Span {
    std::uint32_t begin = none, end = none;
  };
  std::uint32_t on_host(std::vector<std::uint32_t> after = {});
  void wait_until_quiet();
  [[nodiscard]] bool ordered(Node a, std::size_t run_of_a, Node b, std::size_t run_of_b) const;

  Graph graph_;
  StreamPlan plan_;
  IssueOrder issue_order_;
  mutable std::mutex mutex_;  // guards the rest
  HappensBefore steps_;
  std::uint32_t host_ = none;               // the latest step of any host thread, the begins of host nodes aside
  std::vector<std::uint32_t> stream_last_;  // by stream: its latest step
  std::vector<std::uint32_t> event_;        // by node: the step after which its event was recorded last
  std::vector<std::vector<Span>> runs_;     // [run][node]
};

struct StreamLogOptions {
  std::function<void(StreamPlan&)> change = {};               // may break the plan before the device gets it
  IssueOrder issue_order                  = IssueOrder::any;  // or per_rank: with batches, as over NCCL
  std::optional<Rank> rank                = {};               // the only one in this process; none: all are
};

class StreamLogWorld final : public World {
 public:
  explicit StreamLogWorld(int num_ranks, StreamLogOptions options = {});
  ~StreamLogWorld() override;
  [[nodiscard]] int num_ranks() const override { return num_ranks_; }
  [[nodiscard]] RankSet local_ranks() const override { return rank_ ? RankSet(*rank_) : RankSet::all(num_ranks_); }
  [[nodiscard]] bool waits(LaneKind) const override { return false; }
  [[nodiscard]] IssueOrder issue_order() const override;
  [[nodiscard]] bool batches() const override { return issue_order() == IssueOrder::per_rank; }
  [[nodiscard]] Device* device() const override;
  void communicate(const Context& context, const Exchange& exchange) override;
  void abort(std::string_view) noexcept override {}

  [[nodiscard]] const StreamLog& log() const;  // of the last program

 private:
  struct LogDevice;
  int num_ranks_;
  std::optional<Rank> rank_;
  std::unique_ptr<LogDevice> device_;
};

}  // namespace stepgraph::testing
