#include "engine/look/op_times.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using Catch::Matchers::WithinRel;

namespace {
constexpr sg::Rank r0{0}, r1{1};
}

TEST_CASE("a task is a node or matched parts, with its cost and the share of other workers that could help",
          "[engine][op_times]") {
  sg::Graph graph(2);
  graph.add({.op = "mul", .cost = {.flops = 8, .bytes_moved = 2}, .rank = r0});
  graph.add({.op = "mul", .cost = {.flops = 4}, .rank = r1});
  graph.add({.kind = sg::NodeKind::copy, .cost = {.bytes_moved = 3}, .rank = r1});
  const sg::Group both = graph.group({.ranks = {r0, r1}});
  for (const sg::Rank rank : {r0, r1}) {
    const sg::Buffer x = graph.buffer({.rank = rank, .size_bytes = 16, .type = sg::DType::f32});
    graph.add({.accumulates = x,
               .part        = sg::PartSpec{.group = both, .op = sg::PartOp::all_reduce, .type = sg::DType::f32},
               .kind        = sg::NodeKind::communicate,
               .op          = "all_reduce",
               .cost        = {.flops = 1, .bytes_moved = rank == r0 ? 32.0 : 40.0}});
  }
  graph.add({.op = "never", .rank = r0});
  // Three workers: mul 0 runs beside mul 1 for half of its time and beside the copy for all of it.
  const sg::Timeline timeline{.nodes = {{0, 4, 0}, {2, 7, 1}, {0, 8, 2}, {8, 9, 0}, {8, 9, 0}, {}}, .makespan_s = 9};

  const auto tasks = sg::task_times(graph, timeline, 3);
  REQUIRE(tasks.size() == 4);
  CHECK(tasks[0].seconds() == 4);
  CHECK(tasks[0].helped_share == 0.125);  // a quarter: one of three is shared by two; then none
  CHECK_THAT(tasks[0].own_s, WithinRel(2.0 / 2 + 2.0 / 3, 1e-12));
  CHECK_THAT(tasks[1].helped_share, WithinRel(0.25 * 3 / 5, 1e-12));
  CHECK(tasks[2].helped_share == (0.25 * 5 + 1) / 8);  // 2 seconds beside two, 5 beside one, one alone
  CHECK(tasks[3].node == sg::Node{3});
  CHECK(tasks[3].helped_share == 1);
  CHECK(tasks[3].flops == 2);
  CHECK(tasks[3].bytes_moved == 32 + 40);  // the larger of declared and accessed bytes

  const auto ops = sg::op_times(graph, timeline);
  REQUIRE(ops.size() == 3);
  CHECK(ops[0].op == "mul");
  CHECK(ops[0].num_tasks == 2);
  CHECK(ops[0].seconds == 9);
  CHECK_THAT(ops[0].own_s + ops[1].own_s, WithinRel(8.0, 1e-12));  // all the time in which one of them runs
  CHECK(ops[0].flops == 12);
  CHECK(ops[0].bytes_moved == 2);
  CHECK(ops[1].op == "copy");
  CHECK(ops[1].seconds == 8);
  CHECK(ops[2].op == "all_reduce");
  CHECK(ops[2].num_tasks == 1);
  CHECK(ops[2].seconds == 1);
  CHECK(ops[2].own_s == 1);
}

TEST_CASE("a timeline of another graph has no op times", "[engine][op_times][refuses]") {
  sg::Graph graph;
  graph.add({.rank = r0});
  CHECK_THROWS_MATCHES(sg::op_times(graph, {}), sg::Error,
                       MessageMatches(ContainsSubstring("it has 0 nodes, but the graph has 1")));
}
