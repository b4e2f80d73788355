#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <numeric>

#include "engine/simulate/simulate.hpp"
#include "engine/verify/verify.hpp"
#include "ops/transfers/collectives.hpp"

namespace sg = stepgraph;
using Catch::Matchers::WithinRel;

namespace {

constexpr double exact = 1e-12;

std::vector<sg::Rank> ranks(int count) {
  std::vector<sg::Rank> out;
  for (int rank = 0; rank < count; ++rank) out.push_back(sg::Rank{rank});
  return out;
}

sg::Buffer floats(sg::Graph& graph, sg::Rank rank, std::int64_t bytes) {
  return graph.buffer(
      {.rank = rank, .size_bytes = bytes, .type = sg::DType::f32, .lifetime = sg::Lifetime::persistent});
}

// Ranks around one switch, each with its own uplink and downlink.
sg::Machine star(int num_ranks, const sg::Link& link) {
  sg::Machine machine(num_ranks);
  machine.rate(sg::NodeKind::compute, {.flops_per_s = 1});
  const sg::SwitchId root = machine.root_switch();
  for (const sg::Rank rank : ranks(num_ranks)) machine.attach(rank, root, link, {0, link.bytes_per_s});
  return machine;
}

// A graph of messages. Each may wait for a computation at its sender. Sends may run concurrently.
class Messages {
 public:
  explicit Messages(int num_ranks) : graph(num_ranks), all_(graph.group({.name = "all", .ranks = ranks(num_ranks)})) {}

  sg::Node add(int from, int to, std::int64_t bytes, double delay_s = 0) {
    const sg::Buffer in = floats(graph, sg::Rank{from}, bytes), out = floats(graph, sg::Rank{to}, bytes);
    if (delay_s > 0) graph.add({.writes = {in}, .cost = {.flops = delay_s}});
    const sg::Node node =
        graph.add({.reads = {in}, .part = sg::PartSpec{.group = all_, .op = sg::PartOp::send, .peer = sg::Rank{to}}});
    graph.add({.writes = {out}, .part = sg::PartSpec{.group = all_, .op = sg::PartOp::recv, .peer = sg::Rank{from}}});
    return node;
  }

  sg::Graph graph;

 private:
  sg::Group all_;
};

}  // namespace

TEST_CASE("a message takes overhead, latency and its bytes at the bandwidth", "[engine][simulate]") {
  Messages messages(2);
  const sg::Node node = messages.add(0, 1, 120);
  sg::Machine machine = star(2, {.latency_s = 0.5, .bytes_per_s = 60});
  machine.message_overhead(0.25);
  machine.rate(sg::NodeKind::communicate, {.overhead_s = 8});
  CHECK(simulate(messages.graph, machine).nodes[node.id] == sg::NodeTime{0, 8 + 0.25 + 0.5 + 2, -1});
}

TEST_CASE("on a network a communication takes a worker, and idle workers do not speed it up", "[engine][simulate]") {
  sg::Graph graph(2);
  const sg::Group pair = graph.group({.name = "pair", .ranks = ranks(2)});
  for (const sg::Rank rank : ranks(2)) {
    const sg::Buffer x = floats(graph, rank, 80);
    graph.add({.reads  = {x},
               .writes = {x},
               .part   = sg::PartSpec{.group = pair, .op = sg::PartOp::all_reduce},
               .cost   = {.flops = 4}});
  }
  sg::Machine machine = star(2, {.bytes_per_s = 1000});
  machine.rate(sg::NodeKind::communicate, {.flops_per_s = 1});
  machine.bind({}, machine.pool({.workers = 4}));
  const sg::Timeline times = simulate(graph, machine);
  CHECK(times.nodes[0] == sg::NodeTime{0, 4, 0});
  CHECK(times.nodes[1] == times.nodes[0]);
}

TEST_CASE("two messages share a link fairly while both are in flight", "[engine][simulate]") {
  // 100 B/s into rank 2. The first message has the link alone for 1 s, then half of it until it ends; then the second
  // is alone.
  Messages messages(3);
  const sg::Node first = messages.add(0, 2, 300), second = messages.add(1, 2, 200, 1);
  const sg::Timeline times = simulate(messages.graph, star(3, {.bytes_per_s = 100}));
  CHECK(times.nodes[second.id].begin_s == 1);
  CHECK_THAT(times.nodes[first.id].end_s, WithinRel(5.0, exact));   // 100 alone, 200 at 50
  CHECK_THAT(times.nodes[second.id].end_s, WithinRel(5.0, exact));  // 200 at 50

  Messages longer(3);
  const sg::Node a = longer.add(0, 2, 300), b = longer.add(1, 2, 320, 1);
  const sg::Timeline later = simulate(longer.graph, star(3, {.bytes_per_s = 100}));
  CHECK_THAT(later.nodes[a.id].end_s, WithinRel(5.0, exact));
  CHECK_THAT(later.nodes[b.id].end_s, WithinRel(6.2, exact));  // the last 120 at 100
  CHECK_THAT(later.makespan_s, WithinRel(6.2, exact));
}

TEST_CASE("three messages over two links get what max-min fairness gives them", "[engine][simulate]") {
  // Link A (into 3) carries x and y at 100 B/s; link B (out of 1) carries y and z at 30 B/s. So y and z get 15 each,
  // and x gets the 85 that y leaves.
  sg::Machine machine(4);
  machine.rate(sg::NodeKind::compute, {.flops_per_s = 1});
  const sg::SwitchId root = machine.root_switch();
  machine.attach(sg::Rank{0}, root, {});
  machine.attach(sg::Rank{1}, root, {.bytes_per_s = 30}, {});
  machine.attach(sg::Rank{2}, root, {});
  machine.attach(sg::Rank{3}, root, {}, {.bytes_per_s = 100});
  Messages messages(4);
  const sg::Node x = messages.add(0, 3, 8500), y = messages.add(1, 3, 1500), z = messages.add(1, 2, 3000);
  const sg::Timeline times = simulate(messages.graph, machine);
  CHECK_THAT(times.nodes[x.id].end_s, WithinRel(100.0, exact));
  CHECK_THAT(times.nodes[y.id].end_s, WithinRel(100.0, exact));
  CHECK_THAT(times.nodes[z.id].end_s, WithinRel(150.0, exact));  // 1500 at 15, then 1500 at 30
}

TEST_CASE("bandwidth that one message cannot use goes to others only as far as their own links allow",
          "[engine][simulate]") {
  // As above, but x comes over a link of 60 B/s: it gets 60, not the 85 that y leaves.
  sg::Machine machine(4);
  const sg::SwitchId root = machine.root_switch();
  machine.attach(sg::Rank{0}, root, {.bytes_per_s = 60});
  machine.attach(sg::Rank{1}, root, {.bytes_per_s = 30}, {});
  machine.attach(sg::Rank{2}, root, {});
  machine.attach(sg::Rank{3}, root, {}, {.bytes_per_s = 100});
  Messages messages(4);
  const sg::Node x = messages.add(0, 3, 3000), y = messages.add(1, 3, 1500), z = messages.add(1, 2, 1500);
  const sg::Timeline times = simulate(messages.graph, machine);
  CHECK_THAT(times.nodes[x.id].end_s, WithinRel(50.0, exact));
  CHECK_THAT(times.nodes[y.id].end_s, WithinRel(100.0, exact));
  CHECK_THAT(times.nodes[z.id].end_s, WithinRel(100.0, exact));
}

TEST_CASE("activities that share nothing with a change keep their times to the bit", "[engine][simulate]") {
  const auto end_of_first = [](bool others) {
    Messages messages(6);
    const sg::Node node = messages.add(0, 1, 1000);
    for (int i = 0; others && i < 20; ++i) messages.add(2 + i % 2, 4 + i % 2, 40 + 8 * i, 0.1 * i);
    return simulate(messages.graph, star(6, {.latency_s = 0.1, .bytes_per_s = 3})).nodes[node.id].end_s;
  };
  CHECK(end_of_first(true) == end_of_first(false));
}

TEST_CASE("nodes that move bytes share a bus, each no faster than alone", "[engine][simulate]") {
  // 100 B/s. `slow` computes for 10 s and moves 100 bytes meanwhile, so it needs only 10 B/s. The others share 90.
  sg::Graph graph;
  const sg::Node slow = graph.add({.cost = {.flops = 10, .bytes_moved = 100}, .rank = sg::Rank{0}});
  const sg::Node a    = graph.add({.cost = {.bytes_moved = 90}, .rank = sg::Rank{0}});
  const sg::Node b    = graph.add({.cost = {.bytes_moved = 180}, .rank = sg::Rank{0}});
  sg::Machine machine(1);
  machine.rate(sg::NodeKind::compute, {.flops_per_s = 1});
  machine.bind({}, machine.bus({.name = "memory", .bytes_per_s = 100}));
  const sg::Timeline times = simulate(graph, machine);
  CHECK_THAT(times.nodes[slow.id].end_s, WithinRel(10.0, exact));
  CHECK_THAT(times.nodes[a.id].end_s, WithinRel(2.0, exact));  // at 45
  CHECK_THAT(times.nodes[b.id].end_s, WithinRel(3.0, exact));  // 90 at 45, then 90 at 90

  // A busier bus also slows compute-bound nodes: three of 50 B/s each on 100.
  sg::Graph three;
  for (int i = 0; i < 3; ++i) three.add({.cost = {.flops = 4, .bytes_moved = 200}, .rank = sg::Rank{0}});
  CHECK_THAT(simulate(three, machine).makespan_s, WithinRel(6.0, exact));

  // The node's own rate is another bound.
  machine.rate(sg::NodeKind::compute, {.flops_per_s = 1, .bytes_per_s = 20});
  sg::Graph one;
  one.add({.cost = {.bytes_moved = 60}, .rank = sg::Rank{0}});
  CHECK_THAT(simulate(one, machine).makespan_s, WithinRel(3.0, exact));
}

TEST_CASE("a pipeline of forward passes takes microbatches + stages - 1 turns", "[engine][simulate]") {
  const int stages = GENERATE(1, 2, 4), microbatches = GENERATE(1, 3, 8);
  const double latency_s = GENERATE(0.0, 0.25);
  CAPTURE(stages, microbatches, latency_s);
  sg::Graph graph(stages);
  std::vector<sg::Group> hops;
  for (int stage = 0; stage + 1 < stages; ++stage)
    hops.push_back(graph.group({.ranks = {sg::Rank{stage}, sg::Rank{stage + 1}}}));
  std::vector<sg::Buffer> input;
  for (int i = 0; i < microbatches; ++i) input.push_back(floats(graph, sg::Rank{0}, 4));
  for (int stage = 0; stage < stages; ++stage) {
    for (int i = 0; i < microbatches; ++i) {
      const sg::Buffer out = floats(graph, sg::Rank{stage}, 4);
      sg::Buffer& in       = input[static_cast<std::size_t>(i)];
      graph.add({.lane   = graph.lane(sg::Rank{stage}, sg::LaneKind::compute),
                 .reads  = {in},
                 .writes = {out},
                 .cost   = {.flops = 1}});
      if (stage + 1 == stages) continue;
      in = floats(graph, sg::Rank{stage + 1}, 4);
      send_recv(graph, {.group = hops[static_cast<std::size_t>(stage)],
                        .from  = sg::Rank{stage},
                        .to    = sg::Rank{stage + 1},
                        .in    = [&] { return out; },
                        .out   = [&] { return in; }});
    }
  }
  const sg::Timeline times = simulate(graph, star(stages, {.latency_s = latency_s}));
  CHECK(times.makespan_s == microbatches + stages - 1 + latency_s * (stages - 1));
}

TEST_CASE("a ring all-reduce of messages takes 2 (n - 1) rounds of latency and an n-th of the bytes",
          "[engine][simulate]") {
  const int n = GENERATE(2, 3, 4, 8);
  CAPTURE(n);
  const std::int64_t bytes = 4 * 840;
  const std::int64_t chunk = bytes / n;
  sg::Graph graph(n);
  const sg::Group ring = graph.group({.name = "ring", .ranks = ranks(n)});
  std::vector<sg::Buffer> data, scratch;
  for (const sg::Rank rank : ranks(n)) {
    data.push_back(floats(graph, rank, bytes));
    scratch.push_back(floats(graph, rank, chunk));
  }
  for (int round = 0; round < 2 * (n - 1); ++round) {
    for (int rank = 0; rank < n; ++rank) {
      const auto at   = static_cast<std::size_t>(rank);
      const auto part = [&](sg::PartOp op, int peer) {
        return sg::PartSpec{.group = ring, .op = op, .peer = sg::Rank{peer}, .issue = round};
      };
      const auto place        = [&](int of) { return data[at].range((of + 4 * n) % n * chunk, chunk); };
      const bool reduces      = round < n - 1;
      const sg::Access arrive = reduces ? sg::Access(scratch[at]) : place(rank - round);
      graph.add({.lane  = graph.lane(sg::Rank{rank}, sg::LaneKind::pp_send),
                 .reads = {place(reduces ? rank - round : rank + 1 - round)},
                 .part  = part(sg::PartOp::send, (rank + 1) % n)});
      graph.add({.lane   = graph.lane(sg::Rank{rank}, sg::LaneKind::pp_recv),
                 .writes = {arrive},
                 .part   = part(sg::PartOp::recv, (rank + n - 1) % n)});
      if (reduces)
        graph.add({.lane        = graph.lane(sg::Rank{rank}, sg::LaneKind::compute),
                   .reads       = {scratch[at]},
                   .accumulates = {place(rank - 1 - round)}});
    }
  }
  sg::verify(graph);
  const double latency_s = 0.5, bytes_per_s = 80;
  const double closed_form  = 2.0 * (n - 1) * (latency_s + static_cast<double>(chunk) / bytes_per_s);
  const sg::Machine machine = star(n, {.latency_s = latency_s, .bytes_per_s = bytes_per_s});
  CHECK_THAT(simulate(graph, machine).makespan_s, WithinRel(closed_form, exact));
}

namespace {

// One collective over all ranks, of `bytes` in total.
sg::Graph collective(int n, sg::PartOp op, std::int64_t bytes) {
  sg::Graph graph(n);
  const sg::Group all = graph.group({.name = "all", .ranks = ranks(n)});
  std::vector<sg::Buffer> whole, shard;
  for (const sg::Rank rank : ranks(n)) {
    whole.push_back(floats(graph, rank, bytes));
    shard.push_back(floats(graph, rank, bytes / n));
  }
  const auto of = [](const std::vector<sg::Buffer>& buffers) {
    return [&buffers](sg::Rank rank) { return sg::Access(buffers[static_cast<std::size_t>(index(rank))]); };
  };
  sg::Collective spec{.name = "c", .group = all, .type = sg::DType::f32, .in = of(whole)};
  switch (op) {
    case sg::PartOp::all_reduce:
      all_reduce(graph, spec);
      break;
    case sg::PartOp::all_gather:
      spec.in = of(shard), spec.out = of(whole);
      all_gather(graph, spec);
      break;
    case sg::PartOp::reduce_scatter:
      spec.out = of(shard);
      reduce_scatter(graph, spec);
      break;
    case sg::PartOp::broadcast:
      spec.root = sg::Rank{1}, spec.out = of(whole);
      broadcast(graph, spec);
      break;
    default:
      spec.in = {};
      barrier(graph, spec);
  }
  return graph;
}

}  // namespace

TEST_CASE("direct collectives on a flat network take as long as their traffic", "[engine][simulate]") {
  const int n = GENERATE(2, 4, 5, 8);
  CAPTURE(n);
  const std::int64_t bytes = 4 * 840;
  const double others      = n - 1;
  const double shard       = static_cast<double>(bytes) / n;
  sg::Machine machine      = star(n, {.latency_s = 0.5, .bytes_per_s = 100});
  machine.message_overhead(0.125);
  const auto time        = [&](sg::PartOp op) { return simulate(collective(n, op, bytes), machine).makespan_s; };
  const double one_round = 0.5 + 0.125 * others;
  CHECK_THAT(time(sg::PartOp::all_reduce), WithinRel(2 * one_round + 2 * others * shard / 100, exact));
  CHECK_THAT(time(sg::PartOp::all_gather), WithinRel(one_round + others * shard / 100, exact));
  CHECK_THAT(time(sg::PartOp::reduce_scatter), WithinRel(one_round + others * shard / 100, exact));
  CHECK_THAT(time(sg::PartOp::broadcast), WithinRel(one_round + others * static_cast<double>(bytes) / 100, exact));
  CHECK_THAT(time(sg::PartOp::barrier), WithinRel(2 * one_round, exact));
}

TEST_CASE("direct collectives on two levels are as fast as the NICs", "[engine][simulate]") {
  // 3 nodes of 4 ranks. 8 of 11 parts that a rank sends leave its node.
  const int n = 12, per_node = 4;
  const std::int64_t bytes  = 4 * 840;
  const double shard        = static_cast<double>(bytes) / n;
  const double leaves       = per_node * (n - per_node) * shard;  // over each NIC, per direction
  const double nic          = GENERATE(10.0, 1e9);                // slower or faster than the ports
  const sg::Machine machine = sg::two_level_machine({.ranks          = n,
                                                     .ranks_per_node = per_node,
                                                     .inside         = {.latency_s = 0.1, .bytes_per_s = 100},
                                                     .between        = {.latency_s = 0.7, .bytes_per_s = nic}});
  const double gather_s     = std::max(leaves / nic, (n - 1) * shard / 100);
  const auto time           = [&](sg::PartOp op) { return simulate(collective(n, op, bytes), machine).makespan_s; };
  CHECK_THAT(time(sg::PartOp::all_gather), WithinRel(0.7 + gather_s, exact));
  CHECK_THAT(time(sg::PartOp::reduce_scatter), WithinRel(0.7 + gather_s, exact));
  CHECK_THAT(time(sg::PartOp::all_reduce), WithinRel(1.4 + 2 * gather_s, exact));
  const double root_s = std::max((n - per_node) / nic, (n - 1) / 100.0) * static_cast<double>(bytes);
  CHECK_THAT(time(sg::PartOp::broadcast), WithinRel(0.7 + root_s, exact));
  CHECK(time(sg::PartOp::barrier) == 1.4);
}

TEST_CASE("routes have the latencies of their level, exactly", "[engine][simulate]") {
  const sg::Machine machine = sg::two_level_machine(
      {.ranks = 6, .ranks_per_node = 2, .inside = {.latency_s = 1.3e-6}, .between = {.latency_s = 5.7e-6}});
  for (int from = 0; from < 6; ++from) {
    for (int to = 0; to < 6; ++to) {
      if (from == to) continue;
      CAPTURE(from, to);
      Messages messages(6);
      messages.add(from, to, 8);
      CHECK(simulate(messages.graph, machine).makespan_s == (from / 2 == to / 2 ? 1.3e-6 : 5.7e-6));
    }
  }
}

TEST_CASE("the latency of a route is the sum over its links, up and down, however deep", "[engine][simulate]") {
  //            root
  //         /    |     |
  //       top   r2    (r3)
  //      /   |
  //    low   r1
  //     |
  //    r0
  sg::Machine machine(4);
  const sg::SwitchId root = machine.root_switch();
  const sg::SwitchId top  = machine.switch_below(root, {.latency_s = 1}, {.latency_s = 2});
  const sg::SwitchId low  = machine.switch_below(top, {.latency_s = 4}, {.latency_s = 8});
  machine.attach(sg::Rank{0}, low, {.latency_s = 16}, {.latency_s = 32});
  machine.attach(sg::Rank{1}, top, {.latency_s = 64}, {.latency_s = 128});
  machine.attach(sg::Rank{2}, root, {.latency_s = 256}, {.latency_s = 512});
  machine.attach(sg::Rank{3}, root, {});
  const double up[] = {16 + 4 + 1, 64 + 1, 256, 0}, down[] = {32 + 8 + 2, 128 + 2, 512, 0};
  for (int from = 0; from < 4; ++from) {
    for (int to = 0; to < 4; ++to) {
      if (from == to) continue;
      CAPTURE(from, to);
      Messages messages(4);
      messages.add(from, to, 8);
      const double turns_below_root = from + to == 1 ? 1 + 2 : 0;  // between ranks 0 and 1
      CHECK(simulate(messages.graph, machine).makespan_s == up[from] + down[to] - turns_below_root);
    }
  }
  CHECK(simulate(collective(4, sg::PartOp::barrier, 16), machine).makespan_s == 2 * (64 + 1 + 512));
}

TEST_CASE("a collective of one takes no time", "[engine][simulate]") {
  sg::Machine machine = star(1, {.latency_s = 1, .bytes_per_s = 1});
  machine.message_overhead(1);
  CHECK(simulate(collective(1, sg::PartOp::all_reduce, 64), machine).makespan_s == 0);
  CHECK(simulate(collective(1, sg::PartOp::barrier, 64), machine).makespan_s == 0);
}

TEST_CASE("traffic inside a node leaves its NIC alone", "[engine][simulate]") {
  const sg::Machine machine = sg::two_level_machine(
      {.ranks = 4, .ranks_per_node = 2, .inside = {.bytes_per_s = 100}, .between = {.bytes_per_s = 10}});
  Messages messages(4);
  const sg::Node inside = messages.add(0, 1, 500), across = messages.add(1, 2, 100), back = messages.add(2, 1, 100);
  const sg::Timeline times = simulate(messages.graph, machine);
  CHECK_THAT(times.nodes[across.id].end_s, WithinRel(10.0, exact));
  CHECK_THAT(times.nodes[back.id].end_s, WithinRel(10.0, exact));
  CHECK_THAT(times.nodes[inside.id].end_s, WithinRel(500.0 / 90, exact));  // shares the link into rank 1 with `back`
}

TEST_CASE("shards of different sizes load the links they cross", "[engine][simulate]") {
  // Members contribute 40, 80 and 120 bytes: member 2 sends the most, member 0 receives the most.
  sg::Graph graph(3);
  const sg::Group all = graph.group({.name = "all", .ranks = ranks(3)});
  for (const sg::Rank rank : ranks(3)) {
    graph.add({.lane   = graph.lane(rank, sg::LaneKind::gather),
               .reads  = {floats(graph, rank, 40 * (index(rank) + 1))},
               .writes = {floats(graph, rank, 240)},
               .part   = sg::PartSpec{.group = all, .op = sg::PartOp::all_gather}});
  }
  CHECK_THAT(simulate(graph, star(3, {.bytes_per_s = 10})).makespan_s, WithinRel(24.0, exact));  // out of member 2
  sg::Machine wide_out(3);
  const sg::SwitchId root = wide_out.root_switch();
  for (const sg::Rank rank : ranks(3)) wide_out.attach(rank, root, {}, {.bytes_per_s = 10});
  CHECK_THAT(simulate(graph, wide_out).makespan_s, WithinRel(20.0, exact));  // into member 0
}
