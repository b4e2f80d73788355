#include "engine/run/recorder.hpp"

#include <algorithm>
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <chrono>
#include <memory>
#include <thread>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/graph/matching.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/worlds/still_world.hpp"
#include "tests/support/worlds/waiting_world.hpp"
#include "tools/bench/overhead/shapes.hpp"
#include "tools/examples/sharded_step.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

constexpr sg::Rank r0{0};

// The first flaw in the times of a completed step; empty if there is none.
std::string flaw(const sg::Graph& graph, const sg::Timeline& timeline, int workers) {
  if (timeline.nodes.size() != graph.num_nodes()) return "wrong number of nodes";
  double last = 0;
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    const sg::NodeTime& time = timeline.nodes[node];
    if (!time.ran()) return graph.describe(sg::Node{node}) + " did not run";
    if (time.end_s < time.begin_s) return graph.describe(sg::Node{node}) + " ended before it began";
    if (time.worker < 0 || time.worker >= workers) return graph.describe(sg::Node{node}) + " ran on no worker";
    last = std::max(last, time.end_s);
    for (const std::uint32_t before : graph.edges().before({node})) {
      if (timeline.nodes[before].end_s > time.begin_s)
        return graph.describe(sg::Node{node}) + " began before the end of " + graph.describe(sg::Node{before});
    }
  }
  return last == timeline.makespan_s ? "" : "the makespan is not the end of the last node";
}

// Whether the nodes of each worker run one after another, except for nodes of one task.
bool workers_take_turns(const sg::Graph& graph, const sg::Timeline& timeline) {
  const sg::Matching matching = sg::match_parts(graph);
  std::vector<std::uint32_t> order;
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    const bool part = !matching.of_node.empty() && matching.of_node[node] != sg::Matching::none;
    if (!part || matching.meeting(matching.of_node[node])[0] == node) order.push_back(node);
  }
  const auto& times = timeline.nodes;
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::tuple(times[a].worker, times[a].begin_s, times[a].end_s) <
           std::tuple(times[b].worker, times[b].begin_s, times[b].end_s);
  });
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (times[order[i]].worker == times[order[i - 1]].worker && times[order[i]].begin_s < times[order[i - 1]].end_s)
      return false;
  }
  return true;
}

}  // namespace

TEST_CASE("every node of a recorded step begins after its predecessors have ended", "[engine][recorder]") {
  const int threads = GENERATE(1, 2, 4);
  CAPTURE(threads);
  sg::Executor executor({.threads = threads});
  sg::Recorder recorder;
  for (int seed = 1; seed <= sg::testing::cases(40); ++seed) {
    CAPTURE(seed);
    const sg::Graph graph =
        sg::testing::random_graph(static_cast<std::uint64_t>(seed), sg::testing::RandomGraphOptions::medium());
    sg::testing::StillWorld world(graph.num_ranks());
    executor.run(graph, world, &recorder);
    const sg::Timeline timeline = recorder.timeline();
    REQUIRE(flaw(graph, timeline, threads) == "");
    REQUIRE(workers_take_turns(graph, timeline));
  }
}

TEST_CASE("a recorder serves run after run, over many chunks", "[engine][recorder]") {
  // More nodes than a chunk holds, on one worker; then a few, so that nothing of the long run may remain.
  const auto nodes      = static_cast<std::uint32_t>(30'000 / sg::testing::scale());
  const sg::Graph large = sg::token_graph(sg::random_dag(nodes, 2 * nodes, 7)), small = sg::token_graph(sg::chain(5));
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2});
  const sg::Program large_program(large, world), small_program(small, world);
  sg::Recorder recorder;
  for (int round = 0; round < 3; ++round) {
    executor.run(large_program, &recorder);
    CHECK(flaw(large, recorder.timeline(), 2) == "");
    executor.run(small_program, &recorder);
    CHECK(flaw(small, recorder.timeline(), 2) == "");
    executor.run(large_program);  // not recorded
    CHECK(recorder.timeline().nodes.size() == small.num_nodes());
  }
  CHECK(recorder.timeline() == recorder.timeline());
}

TEST_CASE("recorded times agree with the wall clock", "[engine][recorder]") {
  sg::Graph graph;
  const sg::Lane lane = graph.lane(r0, sg::LaneKind::compute);
  graph.add({.name = "short", .lane = lane}, [] {});
  graph.add({.name = "sleep", .lane = lane}, [] { std::this_thread::sleep_for(20ms); });
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  const sg::Program program(graph, world);
  sg::Recorder recorder;
  const auto start = std::chrono::steady_clock::now();
  executor.run(program, &recorder);
  const double wall           = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const sg::Timeline timeline = recorder.timeline();
  CHECK(timeline.nodes[1].end_s - timeline.nodes[1].begin_s >= 0.0199);
  CHECK(timeline.makespan_s <= wall * 1.001);
  CHECK(timeline.makespan_s == timeline.nodes[1].end_s);
}

TEST_CASE("the parts of one communication have the times of their task", "[engine][recorder]") {
  const sg::ShardedStep step = sg::sharded_step({.ranks = 4, .layers = 2, .width = 16, .batch = 4});
  sg::LoopbackWorld world(4);
  sg::Executor executor({.threads = 2});
  const sg::Program program(step.graph, world);
  sg::fill(step, program.memory(), 1);
  sg::Recorder recorder;
  executor.run(program, &recorder);
  const sg::Timeline timeline = recorder.timeline();
  CHECK(flaw(step.graph, timeline, 2) == "");
  const sg::Matching matching = sg::match_parts(step.graph);
  REQUIRE(matching.size() > 0);
  for (std::size_t i = 0; i < matching.size(); ++i) {
    REQUIRE(matching.meeting(i).size() == 4);
    for (const std::uint32_t node : matching.meeting(i))
      CHECK(timeline.nodes[node] == timeline.nodes[matching.meeting(i)[0]]);
  }
}

SCENARIO("a failed step is recorded up to the failure", "[engine][recorder]") {
  GIVEN("a chain whose second node throws") {
    sg::Graph graph;
    const sg::Lane lane = graph.lane(r0, sg::LaneKind::compute);
    graph.add({.name = "before", .lane = lane}, [] {});
    graph.add({.name = "fails", .lane = lane}, [] { throw std::runtime_error("no"); });
    graph.add({.name = "after", .lane = lane}, [] {});
    sg::LoopbackWorld world(1);
    sg::Executor executor({.threads = 2});
    sg::Recorder recorder;
    WHEN("it runs") {
      CHECK_THROWS_AS(executor.run(graph, world, &recorder), sg::Error);
      const sg::Timeline timeline = recorder.timeline();
      THEN("nodes that ran have times, including the failing node, and the others are marked as not run") {
        CHECK(timeline.nodes[0].ran());
        CHECK(timeline.nodes[1].ran());
        CHECK_FALSE(timeline.nodes[2].ran());
        CHECK(timeline.nodes[2] == sg::NodeTime{});
        CHECK(timeline.makespan_s == timeline.nodes[1].end_s);
      }
    }
  }
  GIVEN("a rank whose peer is remote and never answers") {
    sg::Graph graph(2);
    const sg::Group pair = graph.group({.name = "pair", .ranks = {sg::Rank{0}, sg::Rank{1}}});
    for (const sg::Rank rank : {sg::Rank{0}, sg::Rank{1}}) {
      graph.add({.name = "meet",
                 .lane = graph.lane(rank, sg::LaneKind::tp),
                 .part = sg::PartSpec{.group = pair},
                 .kind = sg::NodeKind::communicate});
    }
    sg::testing::WaitingWorld world(2, sg::Rank{0});
    sg::Executor executor({.threads = 1, .waiting_lanes = 1});
    sg::Recorder recorder;
    WHEN("the step is stopped 50 ms after its part has begun to wait") {
      sg::Run run = executor.start(sg::Program(sg::slice(graph, sg::Rank{0}), world), &recorder);
      while (world.entered() == 0) std::this_thread::yield();
      std::this_thread::sleep_for(50ms);
      run.cancel();
      CHECK_THROWS_AS(run.get(), sg::Error);
      THEN("the time it waited counts as its own") {
        const sg::Timeline timeline = recorder.timeline();
        CHECK(timeline.nodes[0].end_s - timeline.nodes[0].begin_s >= 0.049);  // two clocks
      }
    }
  }
}

TEST_CASE("the time that a node waits for a permit to compute is not recorded", "[engine][recorder]") {
  // One body may compute at a time. The second worker belongs to a waiting lane, and both bodies want the permit.
  sg::Graph graph;
  for (int i = 0; i < 2; ++i) {
    graph.add({.name = "sleep", .rank = r0}, [] { std::this_thread::sleep_for(10ms); });
  }
  sg::testing::WaitingWorld world(1);
  sg::Executor executor({.threads = 1, .waiting_lanes = 1});
  sg::Recorder recorder;
  executor.run(graph, world, &recorder);
  const sg::Timeline timeline = recorder.timeline();
  const auto& [a, b]          = std::minmax(timeline.nodes[0], timeline.nodes[1],
                                            [](const auto& x, const auto& y) { return x.begin_s < y.begin_s; });
  CHECK(b.begin_s >= a.end_s);
}

TEST_CASE("a recorder refuses what it cannot record", "[engine][recorder][refuses]") {
  sg::Graph graph;
  auto go = std::make_shared<std::atomic<bool>>(false);
  graph.add({.name = "waits", .rank = r0}, [go] {
    while (!*go) std::this_thread::sleep_for(1ms);
  });
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1}), other({.threads = 1});
  const sg::Program program(graph, world), again(graph, world);
  sg::Recorder recorder;
  CHECK_THROWS_MATCHES(recorder.timeline(), sg::Error, MessageMatches(ContainsSubstring("nothing was recorded")));
  sg::Run run = executor.start(program, &recorder);
  CHECK_THROWS_MATCHES(recorder.timeline(), sg::Error, MessageMatches(ContainsSubstring("still under way")));
  CHECK_THROWS_MATCHES(other.run(again, &recorder), sg::Error, MessageMatches(ContainsSubstring("use one for each")));
  *go = true;
  run.get();
  CHECK(flaw(graph, recorder.timeline(), 1) == "");
  CHECK_NOTHROW(other.run(again, &recorder));  // the refused runs have no effect
}

TEST_CASE("a recorder may be destroyed before its step ends, and a late body does not access it",
          "[engine][recorder]") {
  sg::Graph graph;
  auto go = std::make_shared<std::atomic<bool>>(false), began = std::make_shared<std::atomic<bool>>(false);
  graph.add({.name = "stays", .rank = r0}, [go, began] {
    *began = true;
    while (!*go) std::this_thread::sleep_for(1ms);
  });
  sg::LoopbackWorld world(1);
  {
    sg::Executor executor({.threads = 1, .step_timeout = 5ms, .drain_timeout = 5ms});
    const sg::Program program(graph, world);
    auto recorder = std::make_unique<sg::Recorder>();
    sg::Run run   = executor.start(program, recorder.get());
    while (!*began) std::this_thread::sleep_for(1ms);
    CHECK_THROWS_MATCHES(run.get(), sg::Error, MessageMatches(ContainsSubstring("nodes still run")));
    CHECK_THROWS_MATCHES(recorder->timeline(), sg::Error, MessageMatches(ContainsSubstring("still under way")));
    recorder.reset();
    *go = true;
  }
}
