#include "engine/plan/workspaces.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <sstream>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/runnable_graph.hpp"
#include "engine/run/streams.hpp"
#include "ops/transfers/collectives.hpp"
#include "tests/support/worlds/eager_world.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

const sg::WorkspaceNeeds on_a_device{.bodies = true, .part = {}};

// Two ranks. Each has bodies with 100 and 300 bytes on its compute lane, one with 200 on d2h, and one with 400 without
// a lane; then an all-reduce.
struct Sample {
  sg::Graph graph{2};
  std::vector<sg::Node> nodes;

  Sample() {
    std::vector<sg::Buffer> sums;
    for (const sg::Rank rank : {sg::Rank{0}, sg::Rank{1}}) {
      const auto kept = [&](const char* name) {
        return graph.buffer({.name       = name,
                             .rank       = rank,
                             .size_bytes = 64,
                             .type       = sg::DType::f32,
                             .lifetime   = sg::Lifetime::persistent});
      };
      const sg::Buffer x = kept("x"), y = kept("y"), z = kept("z");
      const auto add = [&](const char* name, std::optional<sg::LaneKind> lane, const sg::Buffer& buffer,
                           std::int64_t bytes) {
        sg::NodeSpec node{.name = name, .accumulates = buffer, .device = true, .workspace_bytes = bytes};
        if (lane) node.lane = graph.lane(rank, *lane);
        nodes.push_back(graph.add(node, [] {}));
      };
      add("small", sg::LaneKind::compute, x, 100);
      add("large", sg::LaneKind::compute, x, 300);
      add("copy", sg::LaneKind::d2h, y, 200);
      add("after copy", std::nullopt, y, 400);
      add("plain", sg::LaneKind::compute, z, 0);
      sums.push_back(z);
    }
    const sg::Group all = graph.group({.name = "all", .ranks = {sg::Rank{0}, sg::Rank{1}}});
    sg::all_reduce(graph, {.name = "sum", .group = all, .lane = sg::LaneKind::reduce, .in = [&](sg::Rank rank) {
                             return sums[static_cast<std::size_t>(sg::index(rank))];
                           }});
  }
};

std::string refusal(const sg::NodeSpec& node) {
  sg::Graph graph;
  try {
    graph.add(node);
  } catch (const sg::Error& error) {
    CHECK(graph.num_nodes() == 0);
    return error.what();
  }
  return {};
}

}  // namespace

TEST_CASE("a stream's workspace is the largest need of its nodes, and the plan counts it beside the arena",
          "[engine][plan][workspace]") {
  const Sample sample;
  const sg::MemoryPlan plan = sg::plan_memory(sample.graph, {.workspaces = on_a_device});
  REQUIRE(plan.workspaces.size() == 4);
  const auto& [rank, lane, bytes, node] = plan.workspaces[0];
  CHECK(rank == sg::Rank{0});
  CHECK(lane == sg::LaneKind::compute);
  CHECK(bytes == 400);
  CHECK(sample.graph.name(node) == "after copy");
  CHECK(plan.workspaces[1].lane == sg::LaneKind::d2h);
  CHECK(plan.workspaces[1].size_bytes == 200);
  CHECK(plan.workspaces[2].rank == sg::Rank{1});
  for (const sg::Rank each : {sg::Rank{0}, sg::Rank{1}}) {
    CHECK(plan.workspace_bytes(each) == 600);
    CHECK(plan.largest_workspace(each).size_bytes == 400);
    CHECK(plan.device_bytes(each) == plan.arena(each).size_bytes + 600);
  }
  std::ostringstream text;
  text << plan;
  CHECK_THAT(text.str(), ContainsSubstring("workspace of") && ContainsSubstring("0-1       compute"));

  const sg::MemoryPlan host = sg::plan_memory(sample.graph);
  CHECK(host.workspaces.empty());
  CHECK(host.device_bytes(sg::Rank{0}) == host.arena(sg::Rank{0}).size_bytes);
  CHECK(host.largest_workspace(sg::Rank{1}).size_bytes == 0);
  CHECK(host.offsets == plan.offsets);
}

TEST_CASE("workspaces survive slices of graphs and of plans, and graphs that differ in them differ",
          "[engine][plan][workspace]") {
  const Sample sample;
  const sg::Graph own = sg::slice(sample.graph, sg::Rank{1});
  const sg::MemoryPlan sliced =
      sg::slice(sample.graph, sg::plan_memory(sample.graph, {.workspaces = on_a_device}), sg::Rank{1});
  const sg::MemoryPlan planned = sg::plan_memory(own, {.workspaces = on_a_device});
  REQUIRE(sliced.workspaces.size() == 2);
  REQUIRE(planned.workspaces.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(sliced.workspaces[i].size_bytes == planned.workspaces[i].size_bytes);
    CHECK(sliced.workspaces[i].node == planned.workspaces[i].node);
  }
  CHECK(own.name(sliced.workspaces[0].node) == "after copy");
  CHECK(own.workspace_bytes(sg::Node{1}) == 300);
  CHECK(own.spec(sg::Node{1}).workspace_bytes == 300);
  CHECK(own.workspace_bytes(sg::Node{4}) == 0);

  sg::Graph a, b;
  a.add({.name = "body", .device = true, .workspace_bytes = 8});
  b.add({.name = "body", .device = true, .workspace_bytes = 9});
  CHECK_FALSE(a == b);
  CHECK(a == sg::Graph(a));
}

TEST_CASE("only bodies that can run on a device have workspace", "[engine][plan][workspace][refuses]") {
  CHECK(refusal({.name = "body", .device = true, .workspace_bytes = 1}).empty());
  CHECK_THAT(refusal({.name = "body", .device = true, .workspace_bytes = -1}),
             ContainsSubstring("node 'body': -1 bytes of workspace: 0 to "));
  CHECK_THAT(refusal({.name = "body", .workspace_bytes = 1}), ContainsSubstring("(set .device)"));
  CHECK_THAT(refusal({.name = "look", .kind = sg::NodeKind::host, .device = true, .workspace_bytes = 1}),
             ContainsSubstring("a host node is on no stream"));
}

TEST_CASE("a node without a lane that needs workspace is on its rank's compute stream, and verify_streams proves it",
          "[engine][streams][workspace]") {
  const Sample sample;
  const sg::LoopbackWorld world(2);
  const sg::RunnableGraph runnable(sample.graph, world, {});
  CHECK(runnable.memory()->workspaces.empty());  // ranks on the host
  sg::StreamPlan plan = sg::plan_streams(runnable, world);
  const auto compute = plan.stream[sample.nodes[0].id], d2h = plan.stream[sample.nodes[2].id];
  CHECK(plan.stream[sample.nodes[3].id] == compute);  // though it follows the copy
  CHECK(plan.workspace_bytes.size() == 2 * sg::num_lane_kinds);
  CHECK(plan.workspace_of(compute) == 400);
  CHECK(plan.workspace_of(d2h) == 200);
  CHECK_NOTHROW(sg::verify_streams(runnable, plan));

  CHECK(plan.workspace_of(sample.nodes[0]).size_bytes == 100);  // its own need, though its stream has more
  CHECK(plan.workspace_of(sample.nodes[4]).size_bytes == 0);

  sg::StreamPlan smaller           = plan;
  smaller.workspace_bytes[compute] = 399;
  CHECK_THROWS_WITH(
      sg::verify_streams(runnable, smaller),
      ContainsSubstring("rank 0 (no lane) 'after copy' on stream 'rank 0 compute' needs bytes 0 to 400 of "
                        "a workspace, but its stream has 399"));
  sg::StreamPlan elsewhere             = plan;
  elsewhere.stream[sample.nodes[3].id] = d2h;
  CHECK_THROWS_WITH(sg::verify_streams(runnable, elsewhere),
                    ContainsSubstring("on stream 'rank 0 d2h' needs bytes 0 to"));
  sg::StreamPlan less = plan;
  --less.node_workspaces.front().size_bytes;
  CHECK_THROWS_WITH(sg::verify_streams(runnable, less), ContainsSubstring("of which it gets 0 to 99"));

  sg::Graph without;
  without.add({.name = "body", .device = true});
  const sg::LoopbackWorld one(1);
  CHECK(sg::plan_streams(sg::RunnableGraph(without, one), one).workspace_bytes.empty());
}

TEST_CASE("a program tells its device the workspaces that the memory plan has, those of parts included",
          "[engine][device][workspace]") {
  const Sample sample;
  sg::testing::EagerWorld world(2);
  world.part_bytes = [](const sg::Graph& graph, sg::Node part) {
    return graph.rank(part) == sg::Rank{1} ? graph.part(part).bytes_read : 0;
  };
  const sg::RunnableGraph runnable(sample.graph, world, {});
  sg::Program program(runnable, world);
  const sg::StreamPlan& streams = world.eager.last_plan;
  std::int64_t planned = 0, told = 0;
  for (const sg::WorkspacePlan& each : runnable.memory()->workspaces) {
    planned += each.size_bytes;
    const auto place = *sample.graph.ranks().place(each.rank);
    CHECK(streams.workspace_of(static_cast<std::uint32_t>(place * sg::num_lane_kinds +
                                                          static_cast<std::size_t>(each.lane))) == each.size_bytes);
  }
  for (const std::int64_t bytes : streams.workspace_bytes) told += bytes;
  CHECK(planned == 2 * 600 + 64);
  CHECK(told == planned);

  // A plan that was made for ranks on the host counts less.
  CHECK_THROWS_WITH(
      sg::Program(sg::RunnableGraph(sample.graph, sg::plan_memory(sample.graph)), world),
      ContainsSubstring("stream 'rank 0 compute' needs 400 bytes of workspace, but the memory plan counts 0"));
  CHECK_NOTHROW(sg::Program(sample.graph, world));  // without a plan

  world.part_bytes = [](const sg::Graph&, sg::Node) { return std::int64_t{-1}; };
  CHECK_THROWS_WITH(sg::RunnableGraph(sample.graph, world, {}), ContainsSubstring("would need -1 bytes of workspace"));
}

TEST_CASE("the workspaces of parts that a rank issues together on one lane add up", "[engine][plan][workspace]") {
  sg::Graph graph(2);
  const sg::Group all = graph.group({.name = "all", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  for (const sg::Rank rank : {sg::Rank{0}, sg::Rank{1}}) {
    for (const int issue : {0, 0, 1}) {
      const sg::Buffer x = graph.buffer({.name = "x", .rank = rank, .size_bytes = 8, .type = sg::DType::f32});
      graph.add({.name        = "sum",
                 .lane        = graph.lane(rank, sg::LaneKind::reduce),
                 .accumulates = x,
                 .part        = sg::PartSpec{.group = all, .type = sg::DType::f32, .issue = issue}});
    }
  }
  sg::WorkspaceNeeds needs;
  needs.part      = [](const sg::Graph& of, sg::Node part) { return of.part(part).issue == 1 ? 15 : 10; };
  const auto plan = sg::plan_workspaces(graph, needs);
  REQUIRE(plan.size() == 2);
  CHECK(plan[0].size_bytes == 256 + 10);
  CHECK(plan[0].node == sg::Node{1});
  const auto of_nodes = sg::node_workspaces(graph, needs);
  REQUIRE(of_nodes.size() == 6);
  CHECK(of_nodes[0] == sg::NodeWorkspace{.node = {0}, .offset_bytes = 0, .size_bytes = 10});
  CHECK(of_nodes[1] == sg::NodeWorkspace{.node = {1}, .offset_bytes = 256, .size_bytes = 10});
  CHECK(of_nodes[2] == sg::NodeWorkspace{.node = {2}, .offset_bytes = 0, .size_bytes = 15});
  CHECK(plan[0].lane == sg::LaneKind::reduce);
}
