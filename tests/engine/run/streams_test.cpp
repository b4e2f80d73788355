#include "engine/run/streams.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/plan/memory_plan.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

sg::StreamPlan streams_of(const sg::Graph& graph, const sg::MemoryPlan& plan) {
  return sg::plan_streams({graph, plan}, sg::LoopbackWorld(graph.num_ranks()));
}

// The plan without one of its waits.
sg::StreamPlan without(sg::StreamPlan plan, std::size_t wait, bool loop) {
  auto& all   = loop ? plan.loop_waits : plan.waits;
  auto& begin = loop ? plan.loop_begin : plan.wait_begin;
  all.erase(all.begin() + static_cast<std::ptrdiff_t>(wait));
  for (std::uint32_t& each : begin) each -= each > wait;
  return plan;
}

}  // namespace

TEST_CASE("streams keep every edge of a planned graph, and each wait is needed", "[engine][streams]") {
  int waits = 0, loop_waits = 0, laneless = 0;
  for (int seed = 1; seed <= sg::testing::cases(200); ++seed) {
    CAPTURE(seed);
    const sg::Graph graph =
        sg::testing::random_graph(static_cast<std::uint64_t>(seed), sg::testing::RandomGraphOptions::medium());
    const sg::MemoryPlan memory = sg::plan_memory(graph);
    const sg::StreamPlan plan   = streams_of(graph, memory);
    REQUIRE(plan.issue_order.size() == graph.num_nodes());
    REQUIRE_NOTHROW(sg::verify_streams({graph, memory}, plan));
    for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) laneless += !graph.lane(sg::Node{i});
    for (const bool loop : {false, true}) {
      const std::size_t count = (loop ? plan.loop_waits : plan.waits).size();
      (loop ? loop_waits : waits) += static_cast<int>(count);
      for (std::size_t i = 0; i < count; i += 1 + count / 8) {
        CAPTURE(loop, i);
        CHECK_THROWS_MATCHES(sg::verify_streams({graph, memory}, without(plan, i, loop)), sg::Error,
                             MessageMatches(ContainsSubstring("an event wait of the first for the second is missing")));
      }
    }
  }
  CHECK(waits > sg::testing::at_least(4000));
  CHECK(loop_waits > sg::testing::at_least(600));
  CHECK(laneless > sg::testing::at_least(800));
}

TEST_CASE("the order of streams is in the edges for simulations of devices", "[engine][streams]") {
  sg::Graph graph;
  const sg::Lane compute = graph.lane(sg::Rank{0}, sg::LaneKind::compute),
                 copies  = graph.lane(sg::Rank{0}, sg::LaneKind::h2d);
  const sg::Buffer x     = graph.buffer({.name = "x", .size_bytes = 8, .lifetime = sg::Lifetime::persistent});
  const sg::Buffer y     = graph.buffer({.name = "y", .size_bytes = 8, .lifetime = sg::Lifetime::persistent});
  graph.add({.name = "copy", .lane = copies, .writes = x, .kind = sg::NodeKind::copy});
  graph.add({.name = "update", .reads = x, .writes = y});  // on the compute stream: it does not use that of a copy
  graph.add({.name = "forward", .lane = compute});
  graph.add({.name = "host", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::host), .kind = sg::NodeKind::host});
  const sg::MemoryPlan memory = sg::plan_memory(graph);
  const sg::Edges edges       = sg::stream_edges(graph, memory);
  const auto before           = [&](std::uint32_t node) {
    const auto found = edges.before(sg::Node{node});
    return std::vector<std::uint32_t>(found.begin(), found.end());
  };
  const bool forward_first = memory.turns[2] < memory.turns[1];
  CHECK(before(0).empty());
  CHECK(before(1) == (forward_first ? std::vector<std::uint32_t>{0, 2} : std::vector<std::uint32_t>{0}));
  CHECK(before(2) == (forward_first ? std::vector<std::uint32_t>{} : std::vector<std::uint32_t>{1}));
  CHECK(before(3).empty());
}

TEST_CASE("a dropped wait is reported with both nodes and their streams", "[engine][streams]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8, .lifetime = sg::Lifetime::persistent});
  graph.add({.name = "gather", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::gather), .writes = x});
  graph.add({.name = "use", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute), .reads = x});
  const sg::MemoryPlan memory = sg::plan_memory(graph);
  const sg::StreamPlan plan   = streams_of(graph, memory);
  CHECK(plan.waits == std::vector<std::uint32_t>{0});
  CHECK(plan.loop_waits == std::vector<std::uint32_t>{1});
  CHECK_THROWS_MATCHES(
      sg::verify_streams({graph, memory}, without(plan, 0, false)), sg::Error,
      MessageMatches(ContainsSubstring("streams: rank 0 compute 'use' on stream 'rank 0 compute' may run before rank 0 "
                                       "gather 'gather' on stream 'rank 0 gather' has ended")));
}

TEST_CASE("nodes of one lane need no waits among themselves, and implied waits are left out", "[engine][streams]") {
  sg::Graph graph;
  const auto lane    = [&](sg::LaneKind kind) { return graph.lane(sg::Rank{0}, kind); };
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8}), y = graph.buffer({.name = "y", .size_bytes = 8});
  graph.add({.name = "a", .lane = lane(sg::LaneKind::gather), .writes = x});
  graph.add({.name = "b", .lane = lane(sg::LaneKind::gather), .writes = y});
  graph.add({.name = "c", .lane = lane(sg::LaneKind::compute), .reads = {x, y}});
  graph.add({.name = "d", .lane = lane(sg::LaneKind::compute), .reads = y});
  const sg::StreamPlan plan = streams_of(graph, sg::plan_memory(graph));
  CHECK(plan.waits == std::vector<std::uint32_t>{1});
  CHECK(plan.num_streams() == 2);
  CHECK(plan.num_events() == 3);  // the next run's a and b wait for c and d
}

TEST_CASE("a host node is on no stream, and a node that several wait for has one event", "[engine][streams]") {
  sg::Graph graph;
  const auto lane    = [&](sg::LaneKind kind) { return graph.lane(sg::Rank{0}, kind); };
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8, .lifetime = sg::Lifetime::persistent});
  graph.add({.name = "a", .lane = lane(sg::LaneKind::compute), .writes = x});
  graph.add({.name = "b", .lane = lane(sg::LaneKind::d2h), .reads = x});
  graph.add({.name = "c", .lane = lane(sg::LaneKind::reduce), .reads = x});
  graph.add({.name = "look", .lane = lane(sg::LaneKind::host), .reads = x, .kind = sg::NodeKind::host});
  const sg::StreamPlan plan = streams_of(graph, sg::plan_memory(graph));
  CHECK(plan.waits == std::vector<std::uint32_t>{0, 0, 0});
  CHECK(plan.loop_waits == std::vector<std::uint32_t>{2, 1});
  CHECK(plan.num_streams() == 3);
  CHECK(plan.num_events() == 3);
}

TEST_CASE("what a host node has waited for needs no wait of the nodes that follow it", "[engine][streams]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8}), y = graph.buffer({.name = "y", .size_bytes = 8});
  graph.add({.name = "make", .writes = x});
  graph.add({.name   = "look",
             .lane   = graph.lane(sg::Rank{0}, sg::LaneKind::host),
             .reads  = x,
             .writes = y,
             .kind   = sg::NodeKind::host});
  graph.add({.name = "use", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::gather), .reads = {x, y}});
  const sg::MemoryPlan memory = sg::plan_memory(graph);
  const sg::StreamPlan plan   = streams_of(graph, memory);
  CHECK(plan.waits == std::vector<std::uint32_t>{0});  // of the host
  CHECK_NOTHROW(sg::verify_streams({graph, memory}, plan));
}

TEST_CASE("streams wait for nodes of host lanes once, and a dropped wait is reported", "[engine][streams]") {
  sg::Graph graph;
  const auto lane    = [&](sg::LaneKind kind) { return graph.lane(sg::Rank{0}, kind); };
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8}), y = graph.buffer({.name = "y", .size_bytes = 8});
  graph.add({.name = "first", .lane = lane(sg::LaneKind::host), .writes = x, .kind = sg::NodeKind::host});
  graph.add({.name = "second", .lane = lane(sg::LaneKind::host), .writes = y, .kind = sg::NodeKind::host});
  graph.add({.name = "use both", .lane = lane(sg::LaneKind::h2d), .reads = {x, y}});
  graph.add({.name = "use first", .lane = lane(sg::LaneKind::h2d), .reads = x});
  graph.add({.name = "elsewhere", .lane = lane(sg::LaneKind::compute), .reads = x});
  const sg::MemoryPlan memory = sg::plan_memory(graph);
  sg::StreamPlan plan         = streams_of(graph, memory);
  const auto waits_of         = [&](std::uint32_t node) {
    const auto waits = plan.host_waits_of(sg::Node{node});
    return std::vector<std::uint32_t>(waits.begin(), waits.end());
  };
  CHECK(waits_of(2) == std::vector<std::uint32_t>{1});  // the host lane runs "first" before
  CHECK(waits_of(3).empty());
  CHECK(waits_of(4) == std::vector<std::uint32_t>{0});
  CHECK_NOTHROW(sg::verify_streams({graph, memory}, plan));
  plan.host_waits[0] = 0;
  CHECK_THROWS_MATCHES(sg::verify_streams({graph, memory}, plan), sg::Error,
                       MessageMatches(ContainsSubstring("rank 0 h2d 'use both' on stream 'rank 0 h2d' may run before "
                                                        "rank 0 host 'second' on the host has ended")));
}

TEST_CASE("a node without a lane does not use the stream of a copy", "[engine][streams]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8}), y = graph.buffer({.name = "y", .size_bytes = 8});
  graph.add({.name = "gather", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::gather), .writes = x});
  graph.add({.name = "copy", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::h2d), .writes = y});
  graph.add({.name = "use both", .reads = {x, y}});
  graph.add({.name = "use copy", .reads = y});
  const sg::StreamPlan plan = streams_of(graph, sg::plan_memory(graph));
  CHECK(plan.lane_of(plan.stream[2]).kind == sg::LaneKind::gather);
  CHECK(plan.lane_of(plan.stream[3]).kind == sg::LaneKind::compute);
}

TEST_CASE("a node without a lane uses the stream of its latest predecessor", "[engine][streams]") {
  sg::Graph graph;
  const auto kept = [&](const char* name) {
    return graph.buffer({.name = name, .size_bytes = 8, .lifetime = sg::Lifetime::persistent});
  };
  const sg::Buffer x = kept("x"), y = kept("y");
  graph.add({.name = "gather", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::gather), .writes = x});
  graph.add({.name = "free", .reads = x, .writes = y});
  graph.add({.name = "first of all", .writes = kept("z")});
  const sg::StreamPlan plan = streams_of(graph, sg::plan_memory(graph));
  CHECK(plan.stream[1] == plan.stream[0]);
  CHECK(plan.name(plan.stream[2]) == "rank 0 compute");
  CHECK(plan.waits.empty());
}
