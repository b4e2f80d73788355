#include "engine/simulate/simulate.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>

#include "engine/base/error.hpp"
#include "tests/support/graphs/rebuild.hpp"
#include "tests/support/graphs/timed_nodes.hpp"
#include "tools/bench/overhead/shapes.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using Catch::Matchers::WithinRel;
using sg::testing::one_pool;
using sg::testing::timed;

namespace {

constexpr sg::Rank r0{0}, r1{1};

}  // namespace

TEST_CASE("a node takes its overhead, then the longer of compute time and memory time", "[engine][simulate]") {
  sg::Graph graph;
  const sg::Node a  = graph.add({.name = "a", .op = "slow", .cost = {.flops = 6, .bytes_moved = 10}, .rank = r0});
  const sg::Node b  = graph.add({.name = "b", .cost = {.flops = 6, .bytes_moved = 40}, .rank = r0});
  const sg::Node c  = graph.add({.name = "c", .kind = sg::NodeKind::copy, .cost = {.bytes_moved = 1}, .rank = r0});
  sg::Machine ideal = sg::Machine(1), machine = ideal;
  machine.rate(sg::NodeKind::compute, {.flops_per_s = 2, .bytes_per_s = 5, .overhead_s = 0.5});
  machine.rate("slow", {.flops_per_s = 1, .overhead_s = 0.25});
  const sg::Timeline times = simulate(graph, machine);
  CHECK(times.nodes[a.id] == sg::NodeTime{0, 6.25, -1});
  CHECK(times.nodes[b.id] == sg::NodeTime{0, 8.5, -1});
  CHECK(times.nodes[c.id] == sg::NodeTime{0, 0, -1});
  CHECK(times.makespan_s == 8.5);
  CHECK(simulate(graph, ideal).makespan_s == 0);
  CHECK(simulate(sg::Graph(), ideal) == sg::Timeline{});
}

TEST_CASE("nodes start when their predecessors have ended", "[engine][simulate]") {
  sg::Graph graph;
  const sg::Lane lane = graph.lane(r0, sg::LaneKind::compute);
  const sg::Buffer x  = graph.token(r0);
  const sg::Node a    = timed(graph, 2, {.lane = lane});
  const sg::Node b    = timed(graph, 3, {.lane = lane, .writes = {x}});
  const sg::Node c    = timed(graph, 1, {});
  const sg::Node d    = timed(graph, 4, {.reads = {x}});
  sg::Machine machine(1);
  machine.rate(sg::NodeKind::compute, {.flops_per_s = 1});
  const sg::Timeline times = simulate(graph, machine);
  CHECK(times.nodes[a.id] == sg::NodeTime{0, 2, -1});
  CHECK(times.nodes[b.id] == sg::NodeTime{2, 5, -1});
  CHECK(times.nodes[c.id] == sg::NodeTime{0, 1, -1});
  CHECK(times.nodes[d.id] == sg::NodeTime{5, 9, -1});
  CHECK(times.makespan_s == 9);

  // The caller's own edges, from higher to lower numbers: d before c before a.
  sg::Edges edges;
  edges.pred_begin          = {0, 1, 2, 3, 3};
  edges.preds               = {c.id, a.id, d.id};
  const sg::Timeline turned = simulate({graph, edges}, machine);
  CHECK(turned.nodes[d.id] == sg::NodeTime{0, 4, -1});
  CHECK(turned.nodes[c.id] == sg::NodeTime{4, 5, -1});
  CHECK(turned.nodes[a.id] == sg::NodeTime{5, 7, -1});
  CHECK(turned.nodes[b.id] == sg::NodeTime{7, 10, -1});
}

TEST_CASE("nodes that can never start are reported by name", "[engine][simulate][refuses]") {
  sg::Graph graph(2);
  const sg::Group pair = graph.group({.name = "pair", .ranks = {r0, r1}});
  const auto send      = [&](sg::Rank from, sg::PartOp op, sg::Rank peer, const char* name) {
    return graph.add({.name = name,
                           .lane = graph.lane(from, sg::LaneKind::pp_send),
                           .part = sg::PartSpec{.group = pair, .op = op, .peer = peer}});
  };
  send(r0, sg::PartOp::send, r1, "to 1");
  send(r0, sg::PartOp::recv, r1, "from 1");
  send(r1, sg::PartOp::send, r0, "to 0");
  send(r1, sg::PartOp::recv, r0, "from 0");
  CHECK_THROWS_MATCHES(simulate(graph, sg::Machine(2)), sg::Error,
                       MessageMatches(ContainsSubstring("'from 1' waits for rank 0 pp_send 'to 1'") &&
                                      ContainsSubstring("which is matched with rank 1 pp_send 'from 0'")));
  send(r0, sg::PartOp::barrier, r1, "alone");
  CHECK_THROWS_MATCHES(simulate(graph, sg::Machine(2)), sg::Error,
                       MessageMatches(ContainsSubstring("'alone' (barrier on group 'pair') has 0 matching parts")));
}

TEST_CASE("graphs, edges and machines that do not fit are refused", "[engine][simulate][refuses]") {
  sg::Graph graph(2);
  const sg::Node node = timed(graph, 1, {.name = "a"});
  CHECK_THROWS_MATCHES(simulate(graph, sg::Machine(3)), sg::Error,
                       MessageMatches(ContainsSubstring("the graph is for 2 ranks, the machine has 3")));
  sg::Machine half(2);
  half.attach(r0, half.root_switch(), {});
  CHECK_THROWS_MATCHES(simulate(graph, half), sg::Error, MessageMatches(ContainsSubstring("rank 1")));
  sg::Edges edges;
  edges.pred_begin = {0};
  CHECK_THROWS_AS(simulate({graph, edges}, sg::Machine(2)), sg::Error);
  edges.pred_begin = {0, 1};
  edges.preds      = {node.id};
  CHECK_THROWS_MATCHES(simulate({graph, edges}, sg::Machine(2)), sg::Error,
                       MessageMatches(ContainsSubstring("'a' waits for rank 0 (no lane) 'a'")));
  edges.preds = {7};
  CHECK_THROWS_AS(simulate({graph, edges}, sg::Machine(2)), sg::Error);
  timed(graph, std::nan(""), {.name = "odd"});
  CHECK_THROWS_MATCHES(simulate(graph, sg::Machine(2)), sg::Error, MessageMatches(ContainsSubstring("'odd' costs")));
}

TEST_CASE("a pool of n workers runs n nodes at a time, the first ready first", "[engine][simulate]") {
  sg::Graph graph;
  std::vector<sg::Node> nodes;
  for (int i = 0; i < 7; ++i) nodes.push_back(timed(graph, 1));
  const sg::Timeline times = simulate(graph, one_pool(3, sg::PoolOrder::first_ready));
  for (int i = 0; i < 7; ++i) {
    CAPTURE(i);
    CHECK(times.nodes[nodes[static_cast<std::size_t>(i)].id] == sg::NodeTime{i / 3 * 1.0, i / 3 + 1.0, i % 3});
  }
  CHECK(simulate(graph, one_pool(7, sg::PoolOrder::first_ready)).makespan_s == 1);
}

TEST_CASE("first_ready goes by ready time before node number", "[engine][simulate]") {
  // One worker. `late` has the lower number, but `early` becomes ready while `second` runs.
  sg::Graph graph;
  const sg::Buffer x = graph.token(r0), y = graph.token(r0);
  const sg::Node first     = timed(graph, 1, {.writes = {x}});
  const sg::Node second    = timed(graph, 1, {.writes = {y}});
  const sg::Node late      = timed(graph, 1, {.reads = {y}});
  const sg::Node early     = timed(graph, 1, {.reads = {x}});
  const sg::Timeline times = simulate(graph, one_pool(1, sg::PoolOrder::first_ready));
  CHECK(times.nodes[first.id].begin_s == 0);
  CHECK(times.nodes[second.id].begin_s == 1);
  CHECK(times.nodes[early.id].begin_s == 2);
  CHECK(times.nodes[late.id].begin_s == 3);
}

TEST_CASE("nodes that become ready at the same time start by node number", "[engine][simulate]") {
  sg::Graph graph;
  const sg::Buffer x = graph.token(r0), y = graph.token(r0);
  timed(graph, 1, {.writes = {x}});
  timed(graph, 1, {.writes = {y}});
  const sg::Node after_y = timed(graph, 1, {.reads = {y}});
  const sg::Node after_x = timed(graph, 1, {.reads = {x}}), last = timed(graph, 1, {.reads = {x}});
  const sg::Timeline times = simulate(graph, one_pool(2, sg::PoolOrder::first_ready));
  CHECK(times.nodes[after_y.id].begin_s == 1);
  CHECK(times.nodes[after_x.id].begin_s == 1);
  CHECK(times.nodes[last.id].begin_s == 2);
}

TEST_CASE("a work-stealing worker continues with the last successor, then its newest task; thieves take the oldest",
          "[engine][simulate]") {
  // The successors b, c, d, e of a become ready at the same time. Worker 0 keeps e and pushes b, c, d; worker 1 steals
  // b.
  sg::Graph graph;
  const sg::Buffer x = graph.token(r0);
  const sg::Node a   = timed(graph, 1, {.writes = {x}});
  const sg::Node b = timed(graph, 10, {.reads = {x}}), c = timed(graph, 2, {.reads = {x}}),
                 d = timed(graph, 3, {.reads = {x}}), e = timed(graph, 4, {.reads = {x}});
  const sg::Timeline times = simulate(graph, one_pool(2, sg::PoolOrder::work_stealing));
  CHECK(times.nodes[a.id] == sg::NodeTime{0, 1, 0});
  CHECK(times.nodes[e.id] == sg::NodeTime{1, 5, 0});
  CHECK(times.nodes[b.id] == sg::NodeTime{1, 11, 1});
  CHECK(times.nodes[d.id] == sg::NodeTime{5, 8, 0});
  CHECK(times.nodes[c.id] == sg::NodeTime{8, 10, 0});
}

TEST_CASE("a work-stealing worker finishes the chain of a source before it takes the next source",
          "[engine][simulate]") {
  // Chains of two: each worker takes a source, continues with its chain, then takes the next source.
  sg::Graph graph;
  std::vector<sg::Node> sources, ends;
  for (int i = 0; i < 4; ++i) {
    const sg::Buffer x = graph.token(r0);
    sources.push_back(timed(graph, 1, {.writes = {x}}));
    ends.push_back(timed(graph, 1, {.reads = {x}}));
  }
  const sg::Timeline deep = simulate(graph, one_pool(2, sg::PoolOrder::work_stealing));
  const sg::Timeline wide = simulate(graph, one_pool(2, sg::PoolOrder::first_ready));
  for (std::size_t i = 0; i < 4; ++i) {
    CAPTURE(i);
    const double turn = static_cast<double>(i / 2);
    CHECK(deep.nodes[sources[i].id].begin_s == 2 * turn);
    CHECK(deep.nodes[ends[i].id] == sg::NodeTime{2 * turn + 1, 2 * turn + 2, static_cast<int>(i % 2)});
    CHECK(wide.nodes[sources[i].id].begin_s == turn);
  }
}

TEST_CASE("a thief tries its last victim first, then the sources, then other queues", "[engine][simulate]") {
  SECTION("sources") {
    sg::Graph graph;
    const sg::Buffer x = graph.token(r0);
    timed(graph, 1, {.writes = {x}});
    const sg::Node pushed = timed(graph, 5, {.reads = {x}});
    timed(graph, 5, {.reads = {x}});  // kept by worker 0
    timed(graph, 2);
    const sg::Node source    = timed(graph, 1);
    const sg::Timeline times = simulate(graph, one_pool(2, sg::PoolOrder::work_stealing));
    CHECK(times.nodes[source.id] == sg::NodeTime{2, 3, 1});
    CHECK(times.nodes[pushed.id] == sg::NodeTime{3, 8, 1});
  }
  SECTION("the last victim") {
    // Worker 2 steals from worker 1 at time 1. At time 3 workers 0 and 1 both have something queued.
    sg::Graph graph;
    const sg::Buffer a = graph.token(r0), b = graph.token(r0), c = graph.token(r0);
    timed(graph, 2, {.writes = {a}});
    timed(graph, 1, {.writes = {b}});
    const sg::Node stolen = timed(graph, 2, {.reads = {b}});
    timed(graph, 1, {.reads = {b}, .writes = {c}});
    const sg::Node of_0 = timed(graph, 9, {.reads = {a}});
    timed(graph, 9, {.reads = {a}});
    const sg::Node of_1 = timed(graph, 9, {.reads = {c}});
    timed(graph, 9, {.reads = {c}});
    sg::Machine machine      = one_pool(3, sg::PoolOrder::work_stealing);
    const sg::Timeline times = simulate(graph, machine);
    CHECK(times.nodes[stolen.id] == sg::NodeTime{1, 3, 2});
    CHECK(times.nodes[of_1.id] == sg::NodeTime{3, 12, 2});
    CHECK(times.nodes[of_0.id].begin_s == 11);
  }
}

TEST_CASE("a parallel node uses idle workers and gives them up at once", "[engine][simulate]") {
  const auto order = GENERATE(sg::PoolOrder::first_ready, sg::PoolOrder::work_stealing);
  CAPTURE(to_string(order));
  sg::Graph graph;
  const sg::Lane lane = graph.lane(r0, sg::LaneKind::compute), host = graph.lane(r0, sg::LaneKind::host);
  const sg::Node wide = timed(graph, 12, {.lane = lane, .parallel = true});
  CHECK(simulate(graph, one_pool(4, order)).makespan_s == 3);
  // A node on a lane without a pool ends after 1 s; then another node needs a worker for 1 s.
  const sg::Buffer x = graph.token(r0);
  timed(graph, 1, {.lane = host, .writes = {x}});
  const sg::Node other = timed(graph, 1, {.lane = graph.lane(r0, sg::LaneKind::tp), .reads = {x}});
  sg::Machine machine  = one_pool(4, order);
  machine.bind({.lane = sg::LaneKind::host}, sg::no_pool);
  const sg::Timeline times = simulate(graph, machine);
  CHECK(times.nodes[other.id] == sg::NodeTime{1, 2, 1});
  CHECK_THAT(times.nodes[wide.id].end_s, WithinRel(3.25, 1e-12));  // 4 + 3 + 4 * 1.25 = 12
  // Two parallel nodes share the two idle workers: 12 at a speed of 2.
  timed(graph, 12, {.parallel = true});
  sg::Graph two;
  timed(two, 12, {.parallel = true});
  timed(two, 12, {.parallel = true});
  CHECK_THAT(simulate(two, one_pool(4, order)).makespan_s, WithinRel(6.0, 1e-12));
  CHECK_THAT(simulate(two, one_pool(3, order)).makespan_s, WithinRel(8.0, 1e-12));
  // Helpers do not shorten the overhead.
  sg::Machine slow = one_pool(4, order);
  slow.rate(sg::NodeKind::compute, {.flops_per_s = 1, .overhead_s = 2});
  CHECK_THAT(simulate(two, slow).makespan_s, WithinRel(8.0, 1e-12));
}

TEST_CASE("without a network a communication is a copy by one worker and the idle ones", "[engine][simulate]") {
  sg::Graph graph(2);
  const sg::Group pair = graph.group({.name = "pair", .ranks = {r0, r1}});
  for (const sg::Rank rank : {r0, r1}) {
    const sg::Buffer x = graph.buffer({.name = "x", .rank = rank, .size_bytes = 100, .type = sg::DType::f32});
    graph.add({.lane   = graph.lane(rank, sg::LaneKind::reduce),
               .reads  = {x},
               .writes = {x},
               .part   = sg::PartSpec{.group = pair, .op = sg::PartOp::all_reduce}});
  }
  timed(graph, 100, {.lane = graph.lane(r0, sg::LaneKind::compute)});
  const sg::Rates rates{.compute = {.flops_per_s = 1}, .communicate = {.bytes_per_s = 10, .overhead_s = 1}};
  // 400 bytes at 10 per second, by worker 0 alone, or with one or three helpers.
  CHECK(simulate(graph, sg::loopback_machine({.ranks = 2, .threads = 2, .rates = rates})).nodes[0].end_s == 41);
  CHECK(simulate(graph, sg::loopback_machine({.ranks = 2, .threads = 3, .rates = rates})).nodes[0].end_s == 21);
  const sg::Timeline times = simulate(graph, sg::loopback_machine({.ranks = 2, .threads = 5, .rates = rates}));
  CHECK(times.nodes[0] == sg::NodeTime{0, 11, 0});
  CHECK(times.nodes[1] == sg::NodeTime{0, 11, 0});
  CHECK(times.nodes[2] == sg::NodeTime{0, 100, 1});
  // Any number of workers is limited by the memory bandwidth.
  CHECK(simulate(graph, sg::loopback_machine({.ranks = 2, .threads = 5, .memory_bytes_per_s = 20, .rates = rates}))
            .nodes[0]
            .end_s == 21);
  // Bytes that the builder already counted are not added again.
  const sg::Graph counted = sg::testing::rebuild(graph, [](sg::Node node, sg::NodeSpec& spec) {
    if (node.id < 2) spec.cost.bytes_moved = 200;
  });
  CHECK(simulate(counted, sg::loopback_machine({.ranks = 2, .threads = 5, .memory_bytes_per_s = 20, .rates = rates}))
            .nodes[0]
            .end_s == 21);
  // Without a pool there are no helpers.
  sg::Machine unbound(2);
  unbound.rate(sg::NodeKind::communicate, rates.communicate);
  CHECK(simulate(graph, unbound).nodes[0] == sg::NodeTime{0, 41, -1});
}

TEST_CASE("work that never ends on a machine is refused by name", "[engine][simulate][refuses]") {
  const auto refusal = [](const sg::Graph& graph, const sg::Machine& machine) -> std::string {
    try {
      (void)simulate(graph, machine);
    } catch (const sg::Error& error) {
      return error.what();
    }
    return "nothing";
  };
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 4});
  graph.add({.name = "slow", .writes = {x}, .parallel = true, .cost = {.flops = 1e200, .bytes_moved = 1e200}});
  graph.add({.name = "next", .reads = {x}});
  sg::Machine slow = one_pool(2, sg::PoolOrder::first_ready);
  slow.rate(sg::NodeKind::compute, {.flops_per_s = 1e-200});
  CHECK_THAT(refusal(graph, slow), ContainsSubstring("'slow' takes inf s"));
  sg::Machine narrow(1);
  narrow.bind({}, narrow.bus({.name = "memory", .bytes_per_s = 1e-200}));
  CHECK_THAT(refusal(graph, narrow), ContainsSubstring("'slow' never ends on this machine"));
  sg::Machine long_steps(1);
  long_steps.rate(sg::NodeKind::compute, {.overhead_s = 1e308});
  CHECK_THAT(refusal(graph, long_steps), ContainsSubstring("the step takes inf s"));
}

TEST_CASE("parts bound to several pools take one worker of each, all at once", "[engine][simulate]") {
  const auto order = GENERATE(sg::PoolOrder::first_ready, sg::PoolOrder::work_stealing);
  CAPTURE(to_string(order));
  // Each rank has one worker, and three messages form a ring. The first message goes first: while rank 1's worker is
  // busy, rank 0's worker waits for it. With work stealing, messages precede other work.
  sg::Graph graph(3);
  const sg::Group all = graph.group({.name = "all", .ranks = {r0, r1, sg::Rank{2}}});
  const auto message  = [&](sg::Rank from, sg::Rank to) {
    const auto end = [&](sg::Rank at, sg::PartOp op, sg::Rank peer) {
      return graph.add({.part = sg::PartSpec{.group = all, .op = op, .peer = peer}, .rank = at});
    };
    return std::pair(end(from, sg::PartOp::send, to), end(to, sg::PartOp::recv, from));
  };
  const sg::Node busy   = timed(graph, 5, {.rank = r1});
  const auto [ab, ba]   = message(r0, r1);
  const auto [bc, cb]   = message(r1, sg::Rank{2});
  const auto [ca, ac]   = message(sg::Rank{2}, r0);
  const sg::Node behind = timed(graph, 1, {.rank = r0});
  sg::Machine machine(3);
  machine.rate(sg::NodeKind::compute, {.flops_per_s = 1});
  machine.rate(sg::NodeKind::communicate, {.overhead_s = 1});
  for (int rank = 0; rank < 3; ++rank)
    machine.bind({.rank = sg::Rank{rank}}, machine.pool({.name = "host", .order = order}));
  const sg::Timeline times = simulate(graph, machine);
  const double first       = order == sg::PoolOrder::first_ready ? 5 : 0;
  CHECK(times.nodes[busy.id].begin_s == (order == sg::PoolOrder::first_ready ? 0 : 2));
  CHECK(times.nodes[ab.id] == sg::NodeTime{first, first + 1, 0});
  CHECK(times.nodes[ba.id] == sg::NodeTime{first, first + 1, 1});
  CHECK(times.nodes[bc.id] == sg::NodeTime{first + 1, first + 2, 1});
  CHECK(times.nodes[cb.id] == sg::NodeTime{first + 1, first + 2, 2});
  CHECK(times.nodes[ca.id] == sg::NodeTime{first + 2, first + 3, 2});
  CHECK(times.nodes[ac.id] == sg::NodeTime{first + 2, first + 3, 0});
  CHECK(times.nodes[behind.id] == sg::NodeTime{first + 3, first + 4, 0});
}

TEST_CASE("a message does not wait until a worker has finished its own tasks", "[engine][simulate]") {
  // Rank 0's worker continues with its own successors unless a message needs it.
  sg::Graph graph(2);
  const sg::Group pair = graph.group({.name = "pair", .ranks = {r0, r1}});
  for (int i = 0; i < 3; ++i) timed(graph, 1, {.lane = graph.lane(r0, sg::LaneKind::compute)});
  const sg::Buffer x = graph.token(r1);
  timed(graph, 0.5, {.writes = {x}, .rank = r1});
  const sg::Node send =
      graph.add({.part = sg::PartSpec{.group = pair, .op = sg::PartOp::send, .peer = r1}, .rank = r0});
  graph.add({.reads = {x}, .part = sg::PartSpec{.group = pair, .op = sg::PartOp::recv, .peer = r0}});
  sg::Machine machine(2);
  machine.rate(sg::NodeKind::compute, {.flops_per_s = 1});
  machine.rate(sg::NodeKind::communicate, {.overhead_s = 0.25});
  for (const sg::Rank rank : {r0, r1})
    machine.bind({.rank = rank}, machine.pool({.order = sg::PoolOrder::work_stealing}));
  const sg::Timeline times = simulate(graph, machine);
  CHECK(times.nodes[send.id] == sg::NodeTime{1, 1.25, 0});
  CHECK(times.nodes[1] == sg::NodeTime{1.25, 2.25, 0});
}

TEST_CASE("a graph of one rank is simulated alone", "[engine][simulate]") {
  const auto build = [](sg::Graph graph) {
    const sg::Group all = graph.group({.name = "all", .ranks = {r0, r1, sg::Rank{2}, sg::Rank{3}}});
    for (int rank = 0; rank < 4; ++rank) {
      if (!graph.holds(sg::Rank{rank})) continue;
      const auto buffer = [&](std::int64_t bytes) {
        return graph.buffer({.rank = sg::Rank{rank}, .size_bytes = bytes, .type = sg::DType::f32});
      };
      const auto part = [&](sg::PartOp op, std::int64_t in, std::int64_t out) {
        sg::NodeSpec spec{.lane = graph.lane(sg::Rank{rank}, sg::LaneKind::reduce),
                          .part = sg::PartSpec{.group = all, .op = op}};
        if (op == sg::PartOp::broadcast) spec.part->root = r1;
        if (in > 0) spec.reads = {buffer(in)};
        if (out > 0) spec.writes = {buffer(out)};
        graph.add(spec);
      };
      part(sg::PartOp::all_reduce, 64, 64);
      part(sg::PartOp::all_gather, 16, 64);
      part(sg::PartOp::reduce_scatter, 64, 16);
      part(sg::PartOp::broadcast, rank == 1 ? 64 : 0, 64);
      part(sg::PartOp::barrier, 0, 0);
    }
    return graph;
  };
  const sg::Machine machine = sg::two_level_machine({.ranks          = 4,
                                                     .ranks_per_node = 2,
                                                     .inside         = {.latency_s = 0.25, .bytes_per_s = 64},
                                                     .between        = {.latency_s = 1, .bytes_per_s = 16}});
  const sg::Timeline whole  = simulate(build(sg::Graph(4)), machine);
  for (int rank = 0; rank < 4; ++rank) {
    CAPTURE(rank);
    const sg::Timeline alone = simulate(build(sg::Graph(4, sg::Rank{rank})), machine);
    REQUIRE(alone.nodes.size() == 5);
    for (std::size_t i = 0; i < 5; ++i) CHECK(alone.nodes[i] == whole.nodes[static_cast<std::size_t>(rank) * 5 + i]);
  }
}

TEST_CASE("a simulation repeats bit for bit, and independent nodes may be added in any order", "[engine][simulate]") {
  const sg::Graph graph = sg::token_graph(sg::random_dag(2000, 4000, 5));
  sg::Machine machine   = sg::loopback_machine({.ranks = 1, .threads = 3, .rates = {.compute = {.overhead_s = 1e-3}}});
  CHECK(simulate(graph, machine) == simulate(graph, machine));

  const auto lanes = [](std::vector<std::size_t> order) {
    sg::Graph chains(4);
    for (int turn = 0; turn < 20; ++turn) {
      for (const std::size_t rank : order)
        timed(chains, 0.1 * static_cast<double>((turn * 7 + static_cast<int>(rank) * 3) % 11),
              {.lane = chains.lane(sg::Rank{static_cast<int>(rank)}, sg::LaneKind::compute)});
    }
    return chains;
  };
  sg::Machine four(4);
  four.rate(sg::NodeKind::compute, {.flops_per_s = 1});
  CHECK(simulate(lanes({0, 1, 2, 3}), four).makespan_s == simulate(lanes({2, 0, 3, 1}), four).makespan_s);
}
