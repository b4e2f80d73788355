#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>

#include "engine/simulate/simulate.hpp"
#include "tests/support/graphs/timed_nodes.hpp"

namespace sg = stepgraph;
using Catch::Matchers::WithinRel;
using sg::testing::one_pool;
using sg::testing::timed;

namespace {

constexpr sg::Rank r0{0}, r1{1};

}  // namespace

TEST_CASE("a measured op takes its busy time or its time alone", "[engine][simulate]") {
  const auto order    = GENERATE(sg::PoolOrder::first_ready, sg::PoolOrder::work_stealing);
  sg::Machine machine = one_pool(3, order);
  machine.rate(sg::NodeKind::compute, {.overhead_s = 1});
  machine.rate("mul", sg::RateTable({{.flops = 100, .busy_s = 12, .alone_s = 4}}));
  const auto makespan = [&](int copies, bool parallel = false) {
    sg::Graph graph;
    for (int i = 0; i < copies; ++i) timed(graph, 100, {.op = "mul", .parallel = parallel});
    return simulate(graph, machine).makespan_s;
  };
  CHECK_THAT(makespan(1), WithinRel(1.0 + 4, 1e-12));
  CHECK_THAT(makespan(1, true), WithinRel(1.0 + 4, 1e-12));  // the measurement includes helpers
  CHECK_THAT(makespan(3), WithinRel(1.0 + 12, 1e-12));
  // Two nodes on three workers: each has half an idle worker. A whole one would double its speed.
  CHECK_THAT(makespan(2), WithinRel(1.0 + 8, 1e-12));
  // With the time with one helper, speed is measured at 0, 1 and 4 helpers, and grows evenly between these.
  machine = one_pool(5, order);
  machine.rate("mul", sg::RateTable({{.flops = 100, .busy_s = 12, .alone_s = 2, .paired_s = 10}}));
  CHECK_THAT(makespan(1), WithinRel(2.0, 1e-12));
  CHECK_THAT(makespan(5), WithinRel(12.0, 1e-12));
  CHECK_THAT(makespan(2), WithinRel(1 / (1.0 / 10 + 0.5 / 3 * (1.0 / 2 - 1.0 / 10)), 1e-12));  // 1.5 helpers
  CHECK_THAT(makespan(3), WithinRel(1 / (1.0 / 12 + 2.0 / 3 * (1.0 / 10 - 1.0 / 12)), 1e-12));
  // With the time of two nodes that share all workers too, it is also measured at 2.5 of 6 helpers.
  machine = one_pool(7, order);
  machine.rate("mul", sg::RateTable({{.flops = 100, .busy_s = 12, .alone_s = 2, .paired_s = 10, .halved_s = 3}}));
  CHECK_THAT(makespan(1), WithinRel(2.0, 1e-12));
  CHECK_THAT(makespan(2), WithinRel(3.0, 1e-12));
  CHECK_THAT(makespan(3), WithinRel(1 / (1.0 / 10 + (4.0 / 3 - 1) / 1.5 * (1.0 / 3 - 1.0 / 10)), 1e-12));
  CHECK_THAT(makespan(7), WithinRel(12.0, 1e-12));
  machine.rate("mul", sg::RateTable({{.flops = 100, .busy_s = 12, .alone_s = 2, .halved_s = 3}}));
  CHECK_THAT(makespan(2), WithinRel(3.0, 1e-12));
  CHECK_THAT(makespan(4), WithinRel(1 / (1.0 / 12 + 0.75 / 2.5 * (1.0 / 3 - 1.0 / 12)), 1e-12));
  machine.slow(r0, 2);
  CHECK_THAT(makespan(2), WithinRel(6.0, 1e-12));
  machine = one_pool(4, order);  // half of three others is one: that is one helper
  machine.rate("mul", sg::RateTable({{.flops = 100, .busy_s = 12, .alone_s = 2, .paired_s = 10, .halved_s = 3}}));
  CHECK_THAT(makespan(2), WithinRel(10.0, 1e-12));
  machine = one_pool(2, order);  // one helper is all
  machine.rate("mul", sg::RateTable({{.flops = 100, .busy_s = 12, .alone_s = 2, .paired_s = 10}}));
  CHECK_THAT(makespan(1), WithinRel(2.0, 1e-12));
  CHECK_THAT(makespan(2), WithinRel(12.0, 1e-12));
  sg::Machine single = one_pool(1, order);
  single.rate("mul", sg::RateTable({{.flops = 100, .busy_s = 12, .alone_s = 4}}));
  sg::Graph graph;
  timed(graph, 50, {.op = "mul"});
  CHECK_THAT(simulate(graph, single).makespan_s, WithinRel(2.0, 1e-12));
}

TEST_CASE("matched parts of a measured op are looked up together", "[engine][simulate]") {
  sg::Graph two(2);
  const sg::Group pair = two.group({.ranks = {r0, r1}});
  for (const sg::Rank rank : {r0, r1}) {
    const sg::Buffer x = two.buffer({.rank = rank, .size_bytes = 100, .type = sg::DType::f32});
    two.add({.accumulates = {x},
             .part        = sg::PartSpec{.group = pair, .op = sg::PartOp::all_reduce, .type = sg::DType::f32},
             .op          = "all_reduce"});
  }
  sg::Machine shared = sg::loopback_machine({.ranks = 2, .threads = 2});
  shared.rate("all_reduce", sg::RateTable({{.bytes_moved = 400, .busy_s = 9, .alone_s = 7}}));
  CHECK_THAT(simulate(two, shared).makespan_s, WithinRel(7.0, 1e-12));
}

TEST_CASE("a measured op that is very slow alone takes that time, and its successors follow", "[engine][simulate]") {
  const auto order    = GENERATE(sg::PoolOrder::first_ready, sg::PoolOrder::work_stealing);
  const double alone  = GENERATE(1e3, 1e16, 1e17, 1e300);  // from 2^53 on, 1 / alone vanishes beside 1 / busy
  sg::Machine machine = one_pool(3, order);
  machine.rate("mul", sg::RateTable({{.flops = 100, .busy_s = 1e-6, .alone_s = alone}}));
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 4});
  graph.add({.name = "slow", .writes = {x}, .op = "mul", .cost = {.flops = 100}});
  graph.add({.name = "next", .reads = {x}, .op = "mul", .cost = {.flops = 100}});
  const sg::Timeline found = simulate(graph, machine);
  CHECK_THAT(found.nodes[0].end_s, WithinRel(alone, 1e-12));
  CHECK_THAT(found.makespan_s, WithinRel(2 * alone, 1e-12));
}
