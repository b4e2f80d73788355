#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <numeric>

#include "engine/graph/matching.hpp"
#include "engine/simulate/simulate.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/graphs/rank_sets.hpp"
#include "tests/support/graphs/rebuild.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using sg::testing::Random;

namespace {

constexpr double rounding = 1e-9;

// The graph with random costs and some parallel nodes.
sg::Graph with_costs(const sg::Graph& graph, Random& random) {
  return sg::testing::rebuild(graph, [&](sg::Node, sg::NodeSpec& spec) {
    spec.cost     = {.flops       = static_cast<double>(random.below(5)),
                     .bytes_moved = static_cast<double>(random.below(3) * 10)};
    spec.parallel = random.chance(20);
  });
}

struct Drawn {
  sg::Machine machine;
  bool one_pool = false;  // for all nodes
  int workers   = 0;
};

Drawn random_machine(int num_ranks, Random& random) {
  Drawn out{sg::Machine(num_ranks)};
  sg::Machine& machine = out.machine;
  machine.rate(sg::NodeKind::compute, {.flops_per_s = 2, .overhead_s = random.chance(50) ? 0.25 : 0});
  machine.rate(sg::NodeKind::communicate, {.bytes_per_s = 100});
  if (random.chance(50)) {
    const sg::SwitchId root = machine.root_switch();
    sg::SwitchId at         = root;
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (random.chance(50)) at = machine.switch_below(random.chance(50) ? root : at, {0.25, 50});
      machine.attach(sg::Rank{rank}, at, {0.5, 100});
    }
    machine.message_overhead(0.125);
  }
  const auto pool = [&] {
    const int workers = static_cast<int>(random.between(1, 4));
    out.workers += workers;
    return machine.pool(
        {.workers = workers, .order = random.chance(50) ? sg::PoolOrder::first_ready : sg::PoolOrder::work_stealing});
  };
  out.one_pool = random.chance(50);
  if (out.one_pool) {
    machine.bind({}, pool());
  } else {
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (random.chance(70)) machine.bind({.rank = sg::Rank{rank}}, pool());
    }
    if (random.chance(30)) machine.bind({.lane = sg::LaneKind::compute}, pool());
  }
  if (random.chance(50)) machine.bind({}, machine.bus({.bytes_per_s = 15}));
  return out;
}

// The time of a node alone: overhead and work.
double alone_s(const sg::Graph& graph, const sg::Machine& machine, sg::Node node) {
  if (graph.has_part(node)) return 0;
  const sg::Rate& rate = machine.rate_of(graph.kind(node), graph.op(node));
  return rate.overhead_s + graph.cost(node).flops / rate.flops_per_s;
}

// The time if all workers of its pool help, for a parallel node.
double shortest_s(const sg::Graph& graph, const Drawn& drawn, sg::Node node) {
  const double alone = alone_s(graph, drawn.machine, node);
  return graph.parallel(node) ? alone / std::max(1, drawn.workers) : alone;
}

}  // namespace

TEST_CASE("simulated times obey edges, lanes, workers and lower bounds", "[engine][simulate][property]") {
  std::uint64_t num_waited = 0, num_several = 0;
  for (int seed = 0; seed < sg::testing::cases(400); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const sg::Graph graph = with_costs(
        sg::testing::random_graph(static_cast<std::uint64_t>(seed), sg::testing::RandomGraphOptions::medium()), random);
    const Drawn drawn        = random_machine(graph.num_ranks(), random);
    const sg::Timeline times = simulate(graph, drawn.machine);
    REQUIRE(times == simulate(graph, drawn.machine));

    double last = 0, work = 0;
    std::vector<double> earliest(graph.num_nodes());
    std::vector<std::vector<std::pair<double, double>>> busy(static_cast<std::size_t>(drawn.workers));
    const sg::Matching matching = match_parts(graph);
    bool ordered = true, long_enough = true, together = true, placed = true;
    for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
      const sg::NodeTime& time = times.nodes[node];
      double ready_s           = 0;
      for (const std::uint32_t before : graph.edges().before({node})) {
        ready_s        = std::max(ready_s, times.nodes[before].end_s);
        earliest[node] = std::max(earliest[node], earliest[before]);
      }
      earliest[node] += shortest_s(graph, drawn, {node});
      ordered &= time.begin_s >= ready_s;
      num_waited += time.begin_s > ready_s;
      long_enough &= time.end_s - time.begin_s >= shortest_s(graph, drawn, {node}) - rounding;
      long_enough &= time.end_s >= earliest[node] - rounding;
      last = std::max(last, time.end_s);
      work += alone_s(graph, drawn.machine, {node});
      std::optional<sg::LaneKind> lane;
      if (graph.lane(sg::Node{node})) lane = graph.lane(sg::Node{node})->kind;
      placed &= (time.worker >= 0) == (drawn.machine.pool_of(graph.rank({node}), lane) != sg::no_pool);
      const bool leads = !graph.has_part({node}) || matching.meeting(matching.of_node[node]).front() == node;
      if (graph.has_part({node})) {
        const sg::NodeTime& first = times.nodes[matching.meeting(matching.of_node[node]).front()];
        together &= first.begin_s == time.begin_s && first.end_s == time.end_s;
        num_several += first.worker >= 0 && time.worker >= 0 && first.worker != time.worker;
      }
      const bool shared = !leads && time.worker == times.nodes[matching.meeting(matching.of_node[node]).front()].worker;
      if (time.worker >= 0 && !shared)
        busy[static_cast<std::size_t>(time.worker)].emplace_back(time.begin_s, time.end_s);
    }
    CHECK(ordered);
    CHECK(long_enough);
    CHECK(together);
    CHECK(placed);
    CHECK(times.makespan_s == last);
    if (drawn.one_pool) CHECK(times.makespan_s >= work / drawn.workers - rounding);

    bool alone = true;  // a worker runs one node at a time
    for (auto& spans : busy) {
      std::sort(spans.begin(), spans.end());
      spans.erase(std::unique(spans.begin(), spans.end()), spans.end());  // several parts of one communication
      for (std::size_t i = 1; i < spans.size(); ++i) alone &= spans[i].first >= spans[i - 1].second;
    }
    CHECK(alone);
  }
  CHECK(num_waited > 0);
  CHECK(num_several > 0);
}

TEST_CASE("no worker is idle while a node of its pool is ready", "[engine][simulate][property]") {
  // One pool, one rank, no communication: if a node begins later than it was ready, all workers were busy.
  for (int seed = 0; seed < sg::testing::cases(200); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    sg::testing::RandomGraphOptions options = sg::testing::RandomGraphOptions::medium();
    options.max_ranks                       = 1;
    const sg::Graph graph = with_costs(sg::testing::random_graph(static_cast<std::uint64_t>(seed), options), random);
    const int workers     = static_cast<int>(random.between(1, 4));
    sg::Machine machine(1);
    machine.rate(sg::NodeKind::compute, {.flops_per_s = 1});
    machine.bind({}, machine.pool({.workers = workers,
                                   .order   = seed % 2 ? sg::PoolOrder::first_ready : sg::PoolOrder::work_stealing}));
    const sg::Timeline times = simulate(graph, machine);
    bool kept_busy           = true;
    for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
      double ready_s = 0;
      for (const std::uint32_t before : graph.edges().before({node}))
        ready_s = std::max(ready_s, times.nodes[before].end_s);
      if (times.nodes[node].begin_s == ready_s) continue;
      const double between = (ready_s + times.nodes[node].begin_s) / 2;
      const auto running   = std::count_if(times.nodes.begin(), times.nodes.end(), [&](const sg::NodeTime& time) {
        return time.begin_s <= between && between < time.end_s;
      });
      kept_busy &= running == workers;
    }
    CHECK(kept_busy);
  }
}

TEST_CASE("a rank, or some ranks, simulated alone take no longer than among the others",
          "[engine][simulate][property]") {
  for (int seed = 0; seed < sg::testing::cases(100); ++seed) {
    CAPTURE(seed);
    const sg::Graph graph = sg::testing::random_graph(static_cast<std::uint64_t>(seed));
    // Only latency: with shared bandwidth, an earlier start may mean a later end.
    const sg::Machine machine = sg::two_level_machine(
        {.ranks = graph.num_ranks(), .ranks_per_node = 2, .inside = {.latency_s = 1}, .between = {.latency_s = 2}});
    const sg::Timeline whole = simulate(graph, machine);
    for (const sg::RankSet& ranks : sg::testing::rank_sets(graph.num_ranks())) {
      CAPTURE(to_string(ranks));
      const sg::Timeline alone = simulate(slice(graph, ranks), machine);
      CHECK(alone.makespan_s <= whole.makespan_s);
      CHECK(std::all_of(alone.nodes.begin(), alone.nodes.end(), [](const sg::NodeTime& time) { return time.ran(); }));
    }
  }
}
