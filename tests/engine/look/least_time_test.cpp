#include "engine/look/least_time.hpp"

#include <algorithm>
#include <array>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "engine/look/analysis.hpp"
#include "engine/simulate/simulate.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/graphs/rebuild.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::LaneKind;

namespace {

constexpr sg::Rank r0{0};

// Takes as many seconds as it has flops.
sg::Node add(sg::Graph& graph, const char* name, LaneKind lane, double seconds, sg::AccessList reads,
             sg::AccessList writes) {
  return graph.add(
      {.name = name, .lane = graph.lane(r0, lane), .reads = reads, .writes = writes, .cost = {.flops = seconds}});
}

sg::Machine seconds_machine(int ranks) {
  sg::Machine machine(ranks);
  for (const auto kind : {sg::NodeKind::compute, sg::NodeKind::communicate, sg::NodeKind::copy, sg::NodeKind::host})
    machine.rate(kind, {.flops_per_s = 1});
  return machine;
}

// Copies up and host updates beside each other, a loss that needs both, then compute and copies down beside each other.
struct TwoPhaseStep {
  sg::Graph graph{1};
  sg::Node up, loss;
  TwoPhaseStep() {
    const auto buffer = [&](const char* name) { return graph.buffer({.name = name, .rank = r0, .size_bytes = 64}); };
    const sg::Buffer copied = buffer("copied"), updated = buffer("updated"), lost = buffer("lost");
    add(graph, "up 0", LaneKind::h2d, 3, {}, {copied});
    add(graph, "update", LaneKind::host, 4, {}, {updated});
    up   = add(graph, "up 1", LaneKind::h2d, 2, {}, {copied});
    loss = add(graph, "loss", LaneKind::compute, 0.5, {copied, updated}, {lost});
    for (const char* name : {"gradient 0", "gradient 1", "gradient 2"}) {
      const sg::Buffer gradient = buffer(name);
      add(graph, name, LaneKind::compute, 2, {lost}, {gradient});
    }
    add(graph, "down", LaneKind::d2h, 5, {lost}, {});
  }
};

double span(const sg::Timeline& timeline, sg::Node node) {
  return timeline.nodes[node.id].end_s - timeline.nodes[node.id].begin_s;
}

// As the header says it: all pairs of nodes.
double plain_least_time(const sg::Graph& graph, const sg::Timeline& timeline) {
  double best = 0;
  for (const sg::LaneBusy& lane : sg::busy_lanes(graph, timeline)) best = std::max(best, lane.busy_s);
  for (std::uint32_t x = 0; x < graph.num_nodes(); ++x) {
    std::array<double, sg::num_lane_kinds> before{}, after{};
    for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
      const sg::Node node{i};
      if (i == x || !graph.lane(node) || graph.rank(node) != graph.rank({x})) continue;
      const auto kind = static_cast<std::size_t>(graph.lane(node)->kind);
      if (sg::reaches(graph, node, {x})) before[kind] += span(timeline, node);
      if (sg::reaches(graph, {x}, node)) after[kind] += span(timeline, node);
    }
    best = std::max(best, *std::max_element(before.begin(), before.end()) + span(timeline, {x}) +
                              *std::max_element(after.begin(), after.end()));
  }
  return best;
}

}  // namespace

TEST_CASE("a step in two phases takes at least the busiest lane of each", "[engine][look][least_time]") {
  const TwoPhaseStep step;
  const sg::Timeline times  = simulate(step.graph, seconds_machine(1));
  const sg::LeastTime least = sg::least_time(step.graph, times);
  REQUIRE(times.makespan_s == 11.5);  // the longest lane has 6.5
  CHECK(least.seconds == 11.5);
  REQUIRE(least.between.has_value());  // the last copy or the loss
  CHECK((least.between == step.up || least.between == step.loss));
  CHECK(least.phases == std::vector<sg::LeastTime::Phase>{{r0, LaneKind::h2d, 5}, {r0, LaneKind::compute, 6.5}});
}

TEST_CASE("a step without phases takes at least its busiest lane", "[engine][look][least_time]") {
  sg::Graph graph(1);
  for (const double seconds : {1.0, 2.0}) add(graph, "compute", LaneKind::compute, seconds, {}, {});
  add(graph, "copy", LaneKind::h2d, 2.5, {}, {});
  const sg::LeastTime least = sg::least_time(graph, simulate(graph, seconds_machine(1)));
  CHECK(least.seconds == 3);
  CHECK(least.phases == std::vector<sg::LeastTime::Phase>{{r0, LaneKind::compute, 3}});
  CHECK_FALSE(least.between.has_value());

  // Nodes without a lane count together, as in busy_lanes.
  graph.add({.name = "on no lane", .cost = {.flops = 7}, .rank = r0});
  const sg::LeastTime laneless = sg::least_time(graph, simulate(graph, seconds_machine(1)));
  CHECK(laneless.seconds == 7);
  CHECK(laneless.phases == std::vector<sg::LeastTime::Phase>{{r0, std::nullopt, 7}});
  CHECK_FALSE(laneless.between.has_value());

  CHECK(sg::least_time(sg::Graph(1), {}).seconds == 0);
  CHECK(sg::least_time(sg::Graph(1), {}).phases.empty());
}

TEST_CASE("the least time is that of a search over all pairs of nodes, and never above the simulated time",
          "[engine][look][least_time][property]") {
  int num_two = 0, num_reached = 0;
  for (int seed = 0; seed < sg::testing::cases(300); ++seed) {
    CAPTURE(seed);
    sg::testing::Random random(static_cast<std::uint64_t>(seed));
    sg::testing::RandomGraphOptions options = sg::testing::RandomGraphOptions::medium();
    options.max_nodes                       = 80;
    const sg::Graph graph                   = sg::testing::rebuild(
                          sg::testing::random_graph(static_cast<std::uint64_t>(seed), options), [&](sg::Node, sg::NodeSpec& spec) {
          spec.cost = {.flops = static_cast<double>(random.below(9)), .bytes_moved = 10};
        });
    sg::Machine machine = seconds_machine(graph.num_ranks());
    // Times that depend on what runs at the same time.
    if (random.chance(50)) machine.beside(LaneKind::compute, std::array{LaneKind::h2d}, 1.5);
    if (random.chance(50)) machine.beside(LaneKind::h2d, std::array{LaneKind::compute, LaneKind::tp}, 3);
    if (random.chance(50)) machine.bind({}, machine.bus({.bytes_per_s = 15}));
    const sg::Timeline times  = simulate(graph, machine);
    const sg::LeastTime least = sg::least_time(graph, times);
    CHECK(least.seconds == Approx(plain_least_time(graph, times)));
    CHECK(least.seconds <= times.makespan_s * (1 + 1e-9));
    double sum = 0;
    for (const sg::LeastTime::Phase& phase : least.phases) sum += phase.busy_s;
    CHECK(least.seconds == Approx(sum));
    num_two += least.phases.size() >= 2;
    num_reached += least.seconds >= times.makespan_s * (1 - 1e-9);
  }
  CHECK(num_two > 0);
  CHECK(num_reached > 0);
}

TEST_CASE("the least time of another graph's timeline, of edges in a circle or to another rank, is refused",
          "[engine][look][least_time][refuses]") {
  const TwoPhaseStep step;
  const sg::Timeline times = simulate(step.graph, seconds_machine(1));
  CHECK_THROWS_MATCHES(static_cast<void>(sg::least_time(sg::Graph(1), times)), sg::Error,
                       MessageMatches(ContainsSubstring("timeline: it has 8 nodes, but the graph has 0")));
  sg::Edges edges = step.graph.edges();
  edges.preds.insert(edges.preds.begin(), step.loss.id);  // "up 0", which has no other
  for (std::size_t i = 1; i < edges.pred_begin.size(); ++i) ++edges.pred_begin[i];
  CHECK_THROWS_MATCHES(static_cast<void>(sg::least_time({step.graph, edges}, times)), sg::Error,
                       MessageMatches(ContainsSubstring("nodes follow nodes that wait for each other")));

  sg::Graph two(2);
  for (const int rank : {0, 1}) two.add({.name = "x", .lane = two.lane(sg::Rank{rank}, LaneKind::compute)});
  sg::Edges across = two.edges();
  across.preds.push_back(0);  // of the node of rank 1
  ++across.pred_begin.back();
  const sg::Timeline both = simulate(two, seconds_machine(2));
  CHECK_THROWS_MATCHES(
      static_cast<void>(sg::least_time({two, across}, both)), sg::Error,
      MessageMatches(ContainsSubstring("an edge leads from rank 0 compute 'x' to rank 1 compute 'x'")));
}
