#include "engine/look/analysis.hpp"

#include <algorithm>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <chrono>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/look/summary.hpp"
#include "engine/run/executor.hpp"
#include "tests/support/scale.hpp"
#include "tools/bench/overhead/shapes.hpp"
#include "tools/examples/sharded_step.hpp"

namespace sg = stepgraph;
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

constexpr sg::Rank r0{0}, r1{1};

sg::Timeline timeline(std::vector<sg::NodeTime> nodes) {
  sg::Timeline out{std::move(nodes)};
  for (const sg::NodeTime& time : out.nodes) out.makespan_s = std::max(out.makespan_s, time.end_s);
  return out;
}

std::vector<std::uint32_t> nodes_of(const std::vector<sg::PathStep>& path) {
  std::vector<std::uint32_t> out;
  for (const sg::PathStep& step : path) out.push_back(step.node.id);
  return out;
}

sg::Node add(sg::Graph& graph, const std::string& name, sg::Lane lane, sg::AccessList reads = {},
             sg::AccessList writes = {}, sg::NodeKind kind = sg::NodeKind::compute) {
  return graph.add({.name = name, .lane = lane, .reads = reads, .writes = writes, .kind = kind, .op = "op " + name});
}

// Two ranks: each computes, they communicate, then rank 1 computes again.
struct Meeting {
  sg::Graph graph{2};
  sg::Node a, b, on0, on1, after;
  Meeting() {
    const sg::Buffer x0 = graph.buffer({.name = "x0", .rank = r0, .size_bytes = 64});
    const sg::Buffer x1 = graph.buffer({.name = "x1", .rank = r1, .size_bytes = 64});
    const sg::Group all = graph.group({.name = "all", .ranks = {r0, r1}});
    a                   = add(graph, "a", graph.lane(r0, sg::LaneKind::compute), {}, {x0});
    b                   = add(graph, "b", graph.lane(r1, sg::LaneKind::compute), {}, {x1});
    const auto part     = [&](sg::Rank rank, sg::Buffer x) {
      return graph.add({.name        = "sum",
                            .lane        = graph.lane(rank, sg::LaneKind::tp),
                            .accumulates = {x},
                            .part        = sg::PartSpec{.group = all, .op = sg::PartOp::all_reduce, .type = sg::DType::u8},
                            .kind        = sg::NodeKind::communicate});
    };
    on0   = part(r0, x0);
    on1   = part(r1, x1);
    after = add(graph, "after", graph.lane(r1, sg::LaneKind::compute), {x1});
  }
};

}  // namespace

TEST_CASE("the critical path crosses ranks at matched parts and names the causes of waits", "[engine][analysis]") {
  const Meeting m;
  // a is late: rank 1's sum waits for it although rank 1 was ready at 2.
  const sg::Timeline t = timeline({{0.5, 5, -1}, {0, 2, -1}, {6, 8, -1}, {6, 8, -1}, {8.25, 10, -1}});
  const auto path      = sg::critical_path(m.graph, t);
  CHECK(nodes_of(path) == std::vector<std::uint32_t>{m.a.id, m.on1.id, m.after.id});
  CHECK(path[0].wait_s == 0.5);
  CHECK(path[1].wait_s == 1);
  CHECK(path[2].wait_s == 0.25);

  const sg::Summary summary = sg::summarize(m.graph, t);
  CHECK(summary.path_s[static_cast<std::size_t>(sg::NodeKind::compute)] == 4.5 + 1.75);
  CHECK(summary.path_s[static_cast<std::size_t>(sg::NodeKind::communicate)] == 2);
  CHECK(summary.path_waiting_s == 1.75);
  REQUIRE(summary.path_ops.size() == 3);
  CHECK(summary.path_ops[0].op == "op a");
  CHECK(summary.path_ops[1].op == "all_reduce");
  CHECK(summary.path_ops[2].op == "op after");
}

TEST_CASE("a busy worker is a cause only if no predecessor ended as late", "[engine][analysis]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8});
  const sg::Node a = graph.add({.name = "a", .writes = {x}}), b = graph.add({.name = "b", .rank = r0}),
                 c = graph.add({.name = "c", .reads = {x}});
  const auto path  = [&](std::vector<sg::NodeTime> times) {
    return nodes_of(sg::critical_path(graph, timeline(std::move(times))));
  };
  CHECK(path({{0, 1, 0}, {0, 3, 1}, {3, 4, 1}}) == std::vector{b.id, c.id});    // ready at 1, its worker free at 3
  CHECK(path({{0, 1, 0}, {0, 3, 1}, {3, 4, 0}}) == std::vector{a.id, c.id});    // on another worker
  CHECK(path({{0, 3, 0}, {0, 3, 1}, {3, 4, 1}}) == std::vector{a.id, c.id});    // both ended then: the edge wins
  CHECK(path({{0, 1, 0}, {0, 3, -1}, {3, 4, -1}}) == std::vector{a.id, c.id});  // no worker: none in common
  CHECK(path({{0, 1, 0}, {2, 3, 1}, {1.5, 4, 1}}) == std::vector{a.id, c.id});  // b began later on that worker
  CHECK(path({{0, 1, 0}, {}, {}}) == std::vector{a.id});                        // the step failed
  CHECK(path({{}, {}, {}}).empty());
}

TEST_CASE("the critical path follows added edges, also against the order of adding", "[engine][analysis]") {
  sg::Graph graph;
  const sg::Node a = graph.add({.name = "a", .rank = r0}), b = graph.add({.name = "b", .rank = r0});
  sg::Edges edges = graph.edges();
  CHECK(nodes_of(sg::critical_path({graph, edges}, timeline({{2, 3}, {0, 2}}))) == std::vector{a.id});
  edges.preds      = {b.id};  // b before a
  edges.pred_begin = {0, 1, 1};
  CHECK(nodes_of(sg::critical_path({graph, edges}, timeline({{2, 3}, {0, 2}}))) == std::vector{b.id, a.id});
}

TEST_CASE("nodes that take no time do not make the critical path cycle", "[engine][analysis]") {
  const std::uint32_t count = 2000;
  const sg::Graph graph     = sg::token_graph(sg::chain(count));
  sg::Timeline t{std::vector<sg::NodeTime>(count, {0, 0, 0})};
  const auto path = sg::critical_path(graph, t);
  CHECK(path.size() <= count);
  CHECK_FALSE(path.empty());
}

TEST_CASE("times at which several nodes of a lane, rank or worker run count once", "[engine][analysis]") {
  sg::Graph graph(2);
  const sg::Lane lane = graph.lane(r0, sg::LaneKind::gather);
  add(graph, "a", lane);
  add(graph, "b", lane);
  for (int i = 0; i < 3; ++i) graph.add({.name = "free", .rank = r1});
  const sg::Timeline t = timeline({{0, 1, 0}, {1, 4, 0}, {0, 4, 1}, {1, 2, 2}, {6, 8, 1}});
  const auto lanes     = sg::busy_lanes(graph, t);
  REQUIRE(lanes.size() == 2);
  CHECK(lanes[0].rank == r0);
  CHECK(lanes[0].lane == sg::LaneKind::gather);
  CHECK(lanes[0].busy_s == 4);
  CHECK(lanes[0].share == 0.5);
  CHECK(lanes[1].rank == r1);
  CHECK_FALSE(lanes[1].lane.has_value());
  CHECK(lanes[1].num_nodes == 3);
  CHECK(lanes[1].busy_s == 6);
  const auto workers = sg::busy_workers(t);
  REQUIRE(workers.size() == 3);
  CHECK(workers[1].worker == 1);
  CHECK(workers[1].busy_s == 6);
  CHECK(workers[2].share == 0.125);
}

TEST_CASE("lanes at work at the same time are counted, nodes without a lane are not", "[engine][analysis]") {
  sg::Graph graph(2);
  const auto lane = [&](sg::Rank rank, sg::LaneKind kind) { return graph.lane(rank, kind); };
  add(graph, "a", lane(r0, sg::LaneKind::compute));
  add(graph, "b", lane(r0, sg::LaneKind::compute));
  add(graph, "in", lane(r0, sg::LaneKind::h2d));
  add(graph, "out", lane(r1, sg::LaneKind::d2h));
  add(graph, "nothing", lane(r1, sg::LaneKind::d2h));
  graph.add({.name = "free", .rank = r1});
  // compute [1, 3) and [3, 5), h2d [2, 6), d2h [4, 4.5) and an empty interval. Idle until 1 and from 6 on.
  const sg::Timeline t = timeline({{1, 3}, {3, 5}, {2, 6}, {4, 4.5}, {0.5, 0.5}, {0, 8}});
  CHECK(sg::lanes_at_once(graph, t) == std::vector<double>{3, 2, 2.5, 0.5});
  CHECK(sg::lanes_at_once(graph, timeline(std::vector<sg::NodeTime>(6))) == std::vector<double>{0, 0, 0, 0});
}

TEST_CASE("communication is hidden while the same rank computes, and only then", "[engine][analysis]") {
  sg::Graph graph(2);
  const auto lane = [&](sg::Rank rank, sg::LaneKind kind) { return graph.lane(rank, kind); };
  add(graph, "F", lane(r0, sg::LaneKind::compute));
  add(graph, "B", lane(r0, sg::LaneKind::compute));
  add(graph, "gather", lane(r0, sg::LaneKind::gather), {}, {}, sg::NodeKind::communicate);
  add(graph, "reduce", lane(r0, sg::LaneKind::reduce), {}, {}, sg::NodeKind::communicate);
  add(graph, "gather", lane(r1, sg::LaneKind::gather), {}, {}, sg::NodeKind::communicate);
  add(graph, "load", lane(r1, sg::LaneKind::h2d), {}, {}, sg::NodeKind::copy);
  // Rank 0 computes in [0, 2) and [3, 5), communicates in [1, 4) and [3.5, 6): together [1, 6), hidden 1 + 2.
  const auto hidden = sg::hidden_communication(graph, timeline({{0, 2}, {3, 5}, {1, 4}, {3.5, 6}, {0, 2}, {0, 2}}));
  REQUIRE(hidden.size() == 2);
  CHECK(hidden[0].communicate_s == 5);
  CHECK(hidden[0].hidden_s == 3);
  CHECK(hidden[0].share() == 0.6);
  CHECK(hidden[1].communicate_s == 2);
  CHECK(hidden[1].hidden_s == 0);
}

TEST_CASE("transfers are hidden while the same rank computes, and only then", "[engine][analysis][offload]") {
  sg::Graph graph(2);
  const auto buffer = [&](const char* name, sg::Rank rank, sg::Space space) {
    return graph.buffer({.name = name, .rank = rank, .size_bytes = 4096, .space = space});
  };
  const sg::Buffer slot = buffer("slot", r0, sg::Space::device), home = buffer("home", r0, sg::Space::pinned),
                   file = buffer("file", r0, sg::Space::disk), here = buffer("here", r1, sg::Space::device),
                   there = buffer("there", r1, sg::Space::pinned);
  const auto lane        = [&](sg::Rank rank, sg::LaneKind kind) { return graph.lane(rank, kind); };
  const sg::Node up      = add(graph, "up", lane(r0, sg::LaneKind::h2d), {home}, {slot}, sg::NodeKind::copy);
  const sg::Node f       = add(graph, "F", lane(r0, sg::LaneKind::compute), {slot}, {slot});
  const sg::Node spill   = add(graph, "spill", lane(r0, sg::LaneKind::disk), {home}, {file}, sg::NodeKind::host);
  const sg::Node update  = add(graph, "update", lane(r0, sg::LaneKind::host), {home}, {home}, sg::NodeKind::host);
  // Copies on the compute lane hide nothing, and a copy inside of a device is no transfer.
  const sg::Node down   = add(graph, "down", lane(r1, sg::LaneKind::compute), {here}, {there}, sg::NodeKind::copy);
  const sg::Node inside = add(graph, "inside", lane(r1, sg::LaneKind::compute), {here}, {here}, sg::NodeKind::copy);
  for (const sg::Node node : {up, spill, update, down}) CHECK(sg::is_transfer(graph, node));
  for (const sg::Node node : {f, inside}) CHECK_FALSE(sg::is_transfer(graph, node));

  // Rank 0 transfers in [0, 2), [3, 5) and [4, 7), and computes in [1, 4): 1 + 1 of 6 are hidden.
  const sg::Timeline times = timeline({{0, 2}, {1, 4}, {3, 5}, {4, 7}, {0, 3}, {3, 4}});
  const auto hidden        = sg::hidden_transfers(graph, times);
  REQUIRE(hidden.size() == 2);
  CHECK(hidden[0].transfer_s == 6);
  CHECK(hidden[0].hidden_s == 2);
  CHECK(hidden[0].exposed_s() == 4);
  CHECK(hidden[1].transfer_s == 3);
  CHECK(hidden[1].exposed_s() == 3);

  const sg::Summary summary = sg::summarize(graph, times);
  CHECK(summary.transfers_in_all.transfer_s == 9);
  CHECK(summary.transfers_in_all.hidden_s == 2);
  CHECK_THAT(to_string(summary), ContainsSubstring("transfers      22.2% of their time hidden behind compute") &&
                                     ContainsSubstring("pinned peak") && ContainsSubstring("disk peak"));
}

TEST_CASE("memory is what persists plus step buffers from first to last access", "[engine][analysis]") {
  sg::Graph graph(2);
  const sg::Buffer w =
      graph.buffer({.name = "w", .rank = r0, .size_bytes = 1000, .lifetime = sg::Lifetime::persistent});
  const sg::Buffer x = graph.buffer({.name = "x", .rank = r0, .size_bytes = 10});
  const sg::Buffer y = graph.buffer({.name = "y", .rank = r0, .size_bytes = 200});
  const sg::Buffer p = graph.buffer({.name = "p", .rank = r0, .size_bytes = 7, .space = sg::Space::pinned});
  (void)graph.buffer({.name = "never", .rank = r0, .size_bytes = 5000});
  const sg::Buffer token = graph.token(r1, "token");
  graph.add({.name = "make x", .reads = {w}, .writes = {x}});
  graph.add({.name = "make y", .reads = {x}, .writes = {y}});
  graph.add({.name = "use y", .reads = {y}, .writes = {p}});
  graph.add({.name = "order", .writes = {token}});
  const auto use = sg::memory_use(graph, timeline({{1, 2}, {2, 3}, {3, 4}, {0, 9}}));
  REQUIRE(use.size() == 2);
  CHECK(use[0].space == sg::Space::device);
  CHECK(use[0].persistent == 1000);
  CHECK(use[0].peak == 1210);
  using Samples = std::vector<sg::MemoryUse::Sample>;
  CHECK(use[0].samples == Samples{{0, 1000}, {1, 1010}, {2, 1210}, {3, 1200}, {4, 1000}});
  CHECK(use[1].space == sg::Space::pinned);
  CHECK(use[1].samples == Samples{{0, 0}, {3, 7}, {4, 0}});

  SECTION("a buffer whose nodes did not run does not count") {
    const auto failed = sg::memory_use(graph, timeline({{0, 2}, {}, {}, {}}));
    CHECK(failed[0].samples == Samples{{0, 1010}, {2, 1000}});
    CHECK(failed[1].peak == 0);
  }
  SECTION("a buffer that begins when another ends does not add to it") {
    const auto swapped = sg::memory_use(graph, timeline({{1, 2}, {2, 2}, {2, 3}, {}}));
    CHECK(swapped[0].samples == Samples{{0, 1000}, {1, 1010}, {2, 1200}, {3, 1000}});
  }
}

TEST_CASE("a measured step's path leads without a gap from its start to its end", "[engine][analysis]") {
  const sg::ShardedStep step = sg::sharded_step({.ranks = 8, .layers = 3, .width = 16, .batch = 4});
  sg::LoopbackWorld world(8);
  sg::Executor executor({.threads = 2});
  const sg::Program program(step.graph, world);
  sg::fill(step, program.memory(), 1);
  sg::Recorder recorder;
  executor.run(program, &recorder);
  const sg::Timeline t      = recorder.timeline();
  const sg::Summary summary = sg::summarize(step.graph, t);
  double sum                = summary.path_waiting_s;
  for (const double seconds : summary.path_s) sum += seconds;
  CHECK(sum == Approx(t.makespan_s).epsilon(1e-9));
  CHECK(t.nodes[summary.critical_path.back().node.id].end_s == t.makespan_s);
  for (const auto& lane : summary.lanes) CHECK((lane.share >= 0 && lane.share <= 1));
  CHECK(summary.hidden_in_all.hidden_s <= summary.hidden_in_all.communicate_s);
  CHECK(summary.num_ran == summary.num_nodes);
}

TEST_CASE("a summary prints a line per rank up to eight ranks, and three beyond", "[engine][analysis]") {
  const int ranks = 8;
  for (const int more : {0, 56}) {
    const sg::Graph graph = sg::sharded_step({.ranks = ranks + more, .layers = 2, .width = 64, .batch = 1}).graph;
    sg::Timeline t{std::vector<sg::NodeTime>(graph.num_nodes(), {0, 0.001, 0}), 0.001};
    const std::string text = sg::to_string(sg::summarize(graph, t));
    CAPTURE(text);
    CHECK(std::count(text.begin(), text.end(), '\n') <= (more == 0 ? 40 : 20));
    CHECK_THAT(text, ContainsSubstring("1.00 ms") && ContainsSubstring("critical path") &&
                         ContainsSubstring("gather") && ContainsSubstring("device peak"));
    CHECK_THAT(text, more == 0 ? ContainsSubstring("\n   7  ") : ContainsSubstring("\nmedian  "));
  }
}

TEST_CASE("the summary of a slice has the ranks that the slice holds", "[engine][analysis]") {
  const sg::Graph graph = sg::sharded_step({.ranks = 4, .layers = 2, .width = 64, .batch = 1}).graph;
  const sg::Graph slice = sg::slice(graph, sg::RankSet(std::vector{sg::Rank{1}, sg::Rank{3}}));
  const sg::Timeline t{std::vector<sg::NodeTime>(slice.num_nodes(), {0, 0.001, 0}), 0.001};
  const sg::Summary summary = sg::summarize(slice, t);
  CHECK(summary.ranks == std::vector{sg::Rank{1}, sg::Rank{3}});
  CHECK(summary.hidden.size() == 2);
  const std::string text = sg::to_string(summary);
  CAPTURE(text);
  CHECK_THAT(text, ContainsSubstring("on 2 ranks") && ContainsSubstring("communicates") &&
                       ContainsSubstring("\n   1  ") && ContainsSubstring("\n   3  "));
  CHECK_THAT(text, !ContainsSubstring("\n   0  ") && !ContainsSubstring("\n   2  "));
}

TEST_CASE("a timeline of another graph is refused", "[engine][analysis][refuses]") {
  sg::Graph graph;
  graph.add({.name = "a", .rank = r0});
  const sg::Timeline t = timeline({{0, 1}, {1, 2}});
  CHECK_THROWS_MATCHES(sg::summarize(graph, t), sg::Error,
                       MessageMatches(ContainsSubstring("2 nodes") && ContainsSubstring("has 1")));
}

TEST_CASE("a hundred thousand nodes are analysed in one go", "[engine][analysis]") {
  const auto nodes      = static_cast<std::uint32_t>(100'000 / sg::testing::scale());
  const sg::Graph graph = sg::token_graph(sg::random_dag(nodes, 2 * nodes, 3));
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2});
  sg::Recorder recorder;
  executor.run(graph, world, &recorder);
  const sg::Timeline t = recorder.timeline();
  const auto summary   = sg::summarize(graph, t);
  double sum           = summary.path_waiting_s;
  for (const double seconds : summary.path_s) sum += seconds;
  CHECK(sum == Approx(t.makespan_s).epsilon(1e-6));
}
