#include "engine/run/runnable_graph.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <sstream>

#include "engine/base/error.hpp"
#include "engine/draw/dot.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/streams.hpp"
#include "engine/simulate/simulate.hpp"
#include "engine/verify/verify.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

// Rank 0 of two lives here.
class OneRank final : public sg::World {
 public:
  explicit OneRank(sg::IssueOrder order) : order_(order) {}
  [[nodiscard]] int num_ranks() const override { return 2; }
  [[nodiscard]] sg::RankSet local_ranks() const override { return sg::Rank{0}; }
  [[nodiscard]] bool waits(sg::LaneKind) const override { return false; }
  [[nodiscard]] sg::IssueOrder issue_order() const override { return order_; }
  void communicate(const sg::Context&, const sg::Exchange&) override {}
  void abort(std::string_view) noexcept override {}

 private:
  sg::IssueOrder order_;
};

// Two communications of rank 0, on different lanes and groups. The one that is added last is issued first.
sg::Graph two_parts() {
  sg::Graph graph(2, sg::Rank{0});
  const sg::Group a = graph.group({.name = "a", .ranks = {sg::Rank{0}, sg::Rank{1}}}),
                  b = graph.group({.name = "b", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  graph.add({.name = "second",
             .lane = graph.lane(sg::Rank{0}, sg::LaneKind::gather),
             .part = sg::PartSpec{.group = a, .issue = 1}});
  graph.add({.name = "first",
             .lane = graph.lane(sg::Rank{0}, sg::LaneKind::reduce),
             .part = sg::PartSpec{.group = b, .issue = 0}});
  return graph;
}

}  // namespace

TEST_CASE("the issue order of a world is verified, simulated, drawn and run", "[engine][runnable]") {
  const sg::Graph graph = two_parts();
  const bool planned    = GENERATE(false, true);
  CAPTURE(planned);
  sg::Machine machine(2);
  machine.rate(sg::NodeKind::communicate, {.overhead_s = 1});
  const auto look = [&](sg::IssueOrder order) {
    OneRank world(order);
    const sg::RunnableGraph runnable =
        planned ? sg::RunnableGraph(graph, world, sg::MemoryPlanOptions{}) : sg::RunnableGraph(graph, world);
    sg::verify(runnable);
    std::ostringstream drawing;
    sg::write_dot(runnable, drawing);
    const bool drawn          = drawing.str().find("issued before") != std::string::npos;
    const std::size_t on_task = sg::Program(runnable, world).num_task_edges();
    CHECK(runnable.edges().preds.size() == on_task);
    CHECK(drawn == (on_task == 1));
    CHECK(sg::simulate(runnable, machine).makespan_s == (on_task == 1 ? 2 : 1));
    return on_task;
  };
  CHECK(look(sg::IssueOrder::any) == 0);
  CHECK(look(sg::IssueOrder::per_communicator) == 0);
  CHECK(look(sg::IssueOrder::per_rank) == 1);
}

TEST_CASE("an issue edge that lanes imply is not added", "[engine][runnable]") {
  sg::Graph graph(2, sg::Rank{0});
  const sg::Group group = graph.group({.name = "pair", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  const sg::Lane gather = graph.lane(sg::Rank{0}, sg::LaneKind::gather), tp = graph.lane(sg::Rank{0}, sg::LaneKind::tp);
  const sg::Buffer sent = graph.buffer({.name = "sent", .size_bytes = 4, .lifetime = sg::Lifetime::persistent});
  graph.add({.name = "a", .lane = gather, .writes = {sent}, .part = sg::PartSpec{.group = group}});
  graph.add({.name = "b", .lane = gather, .part = sg::PartSpec{.group = group}});
  graph.add({.name = "c", .lane = gather, .reads = {sent}});
  graph.add({.name = "d", .lane = tp, .accumulates = {sent}, .part = sg::PartSpec{.group = group}});
  CHECK(sg::edges_in_issue_order(graph, sg::IssueOrder::per_rank) == graph.edges());
}

TEST_CASE("a runnable graph fits worlds that need its issue order or less", "[engine][runnable]") {
  const sg::Graph graph = two_parts();
  const sg::RunnableGraph unordered(graph, sg::plan_memory(graph));
  OneRank any(sg::IssueOrder::any), per_rank(sg::IssueOrder::per_rank);
  CHECK_NOTHROW(sg::Program(unordered, any));
  CHECK_NOTHROW(sg::Program(sg::RunnableGraph(graph, per_rank), any));
  CHECK_THROWS_WITH(sg::Program(unordered, per_rank), ContainsSubstring("the world needs 'per rank'"));
  CHECK_THROWS_WITH(sg::plan_streams(unordered, per_rank), ContainsSubstring("the world needs 'per rank'"));
}

TEST_CASE("an issue order against the edges is refused", "[engine][runnable]") {
  sg::Graph graph(2, sg::Rank{0});
  const sg::Group group = graph.group({.name = "pair", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  const sg::Lane lane   = graph.lane(sg::Rank{0}, sg::LaneKind::tp);
  for (const int issue : {1, 0})
    graph.add({.name = "part", .lane = lane, .part = sg::PartSpec{.group = group, .issue = issue}});
  const OneRank world(sg::IssueOrder::per_communicator);
  CHECK_THROWS_WITH(sg::RunnableGraph(graph, world), ContainsSubstring("wait for each other in a cycle"));
  CHECK_FALSE(sg::find_flaws(graph).empty());
}
