// Worlds that need an order of communications get it: the order in which parts start and end is watched while steps
// run.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "engine/run/executor.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;

namespace {

// All ranks are local and no bytes move. Counts parts that start before a part of the same queue with an earlier issue
// position has ended. A queue is a rank, or a rank's use of one group.
class WatchingWorld final : public sg::World {
 public:
  WatchingWorld(const sg::Graph& graph, sg::IssueOrder promised, sg::IssueOrder watched)
      : graph_(graph), promised_(promised), watched_(watched) {}

  [[nodiscard]] int num_ranks() const override { return graph_.num_ranks(); }
  [[nodiscard]] bool waits(sg::LaneKind) const override { return false; }
  [[nodiscard]] sg::IssueOrder issue_order() const override { return promised_; }
  void abort(std::string_view) noexcept override {}
  void begin_step(std::shared_ptr<const sg::RunView>) override {
    not_ended_.clear();
    for (std::uint32_t node = 0; node < graph_.num_nodes(); ++node) {
      if (graph_.has_part({node})) ++not_ended_[queue_of({node})][graph_.part({node}).issue];
    }
  }
  void communicate(const sg::Context&, const sg::Exchange& exchange) override {
    for_parts(exchange, [&](std::map<int, int>& queue, int issue) {
      for (const auto& [earlier, count] : queue) num_early += earlier < issue && count > 0;
    });
    std::this_thread::sleep_for(std::chrono::microseconds(20));  // parts that may run beside it have the time to
    for_parts(exchange, [&](std::map<int, int>& queue, int issue) {
      --queue[issue];
      ++num_parts;
    });
  }

  int num_parts = 0, num_early = 0;

 private:
  using Queue = std::pair<int, std::uint32_t>;

  [[nodiscard]] Queue queue_of(sg::Node node) const {
    const bool by_group = watched_ == sg::IssueOrder::per_communicator;
    return {index(graph_.rank(node)), by_group ? graph_.part(node).group.id : 0};
  }
  template <class Visit>
  void for_parts(const sg::Exchange& exchange, const Visit& visit) {
    const std::lock_guard lock(mutex_);
    for (const sg::LocalPart& part : exchange.parts)
      visit(not_ended_[queue_of(part.node)], graph_.part(part.node).issue);
  }

  const sg::Graph& graph_;
  sg::IssueOrder promised_, watched_;
  std::mutex mutex_;                               // guards the rest and the counts
  std::map<Queue, std::map<int, int>> not_ended_;  // by issue position: how many parts
};

struct Watched {
  int num_parts = 0, num_early = 0;
};
// Many random graphs, run by several threads in a world that promises one order and watches for another.
Watched run_graphs(sg::IssueOrder promised, sg::IssueOrder watched, bool planned) {
  Watched all;
  sg::Executor executor({.threads = 4});
  for (int seed = 1; seed <= sg::testing::cases(60); ++seed) {
    const sg::Graph graph =
        sg::testing::random_graph(static_cast<std::uint64_t>(seed), sg::testing::RandomGraphOptions::medium());
    WatchingWorld world(graph, promised, watched);
    const sg::RunnableGraph runnable =
        planned ? sg::RunnableGraph(graph, world, sg::MemoryPlanOptions{}) : sg::RunnableGraph(graph, world);
    const sg::Program program(runnable, world);
    for (int run = 0; run < 2; ++run) executor.run(program);
    all.num_parts += world.num_parts;
    all.num_early += world.num_early;
  }
  return all;
}

}  // namespace

TEST_CASE("a world that needs its communications in an order is given them in that order",
          "[engine][executor][parts][threads]") {
  const auto order   = GENERATE(sg::IssueOrder::per_communicator, sg::IssueOrder::per_rank);
  const bool planned = GENERATE(false, true);
  CAPTURE(static_cast<int>(order), planned);
  const Watched ordered = run_graphs(order, order, planned);
  CHECK(ordered.num_early == 0);
  CHECK(ordered.num_parts > sg::testing::at_least(1'000));
}

TEST_CASE("without a promise communications start in other orders, too", "[engine][executor][parts][threads]") {
  CHECK(run_graphs(sg::IssueOrder::any, sg::IssueOrder::per_rank, false).num_early > 0);
  CHECK(run_graphs(sg::IssueOrder::per_communicator, sg::IssueOrder::per_rank, false).num_early > 0);
}
