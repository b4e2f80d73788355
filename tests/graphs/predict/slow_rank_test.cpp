// Ranks that are slow, in the simulator: what asynchronous updates win.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "engine/simulate/simulate.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/predict/cluster.hpp"
#include "graphs/predict/prediction.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using Catch::Matchers::WithinRel;

namespace {

// Nearly all of the time is that of products: not of messages, nor of other work.
sg::Cluster cluster_of(const std::string& more) {
  return sg::parse_cluster(R"({"nodes": 1, "devices_per_node": 4, "links": {"inside": {"bandwidth": "100000TB/s"}},
    "rates": {"fp32": "1TFLOPS", "memory": "100000TB/s"}, "memory_bytes": "1GiB")" +
                           more + "}");
}

double step_s(const sg::UpdatePlan& update, const std::string& more, int window) {
  const sg::Model model = sg::gpt2({.layers = 2, .width = 64, .heads = 2, .context = 16, .vocab = 64});
  return sg::predict_step(model, {.layout = {.dp = 4}, .update = update}, {.global = 4, .micro = 1, .seq = 16},
                          cluster_of(more), {.window = window})
      .step_s();
}

constexpr sg::UpdatePlan asynchronous(int bound) {
  return {.mode = sg::UpdateWhen::asynchronous, .max_staleness = bound};
}

}  // namespace

TEST_CASE("the nodes of a slow rank take longer, and only they", "[graphs][predict][simulate]") {
  sg::Graph graph(2);
  for (const int rank : {0, 1})
    graph.add({.name = "work", .lane = sg::Lane{sg::Rank{rank}, sg::LaneKind::compute}, .cost = {.flops = 6}});
  sg::Machine machine(2);
  machine.rate(sg::NodeKind::compute, {.flops_per_s = 2, .overhead_s = 1});
  const sg::Machine before = machine;
  machine.slow(sg::Rank{1}, 2.5);
  CHECK(machine != before);
  CHECK(machine.slowness(sg::Rank{0}) == 1);
  CHECK(machine.slowness(sg::Rank{1}) == 2.5);
  const sg::Timeline timeline = sg::simulate(graph, machine);
  CHECK(timeline.nodes[0].end_s == 4);
  CHECK(timeline.nodes[1].end_s == 10);
  CHECK_THROWS_MATCHES(machine.slow(sg::Rank{2}, 2), sg::Error, MessageMatches(ContainsSubstring("rank 2 (0 to 1)")));
  CHECK_THROWS_MATCHES(machine.slow(sg::Rank{0}, 0), sg::Error,
                       MessageMatches(ContainsSubstring("slow by a factor of 0 (above 0)")));
}

TEST_CASE("a rank that is always slow sets the pace of every mode", "[graphs][predict][asynchronous]") {
  const double plain = step_s({}, "", 1);
  CHECK_THAT(step_s({}, R"(, "slow": [{"rank": 2, "factor": 3}])", 1), WithinRel(3 * plain, 1e-2));
  CHECK_THAT(step_s(asynchronous(2), R"(, "slow": [{"rank": 2, "factor": 3}])", 12), WithinRel(3 * plain, 3e-2));
  CHECK_THAT(step_s(asynchronous(2), "", 12), WithinRel(plain, 3e-2));
}

TEST_CASE("where ranks are slow in turns, a synchronous step takes the slow time, and a bound of 3 hides it",
          "[graphs][predict][asynchronous]") {
  const double plain      = step_s({}, "", 1);
  const std::string turns = R"(, "slow_in_turns": 3)";
  CHECK_THAT(step_s({}, turns, 1), WithinRel(3 * plain, 1e-2));
  const double bound_0 = step_s(asynchronous(0), turns, 12), bound_1 = step_s(asynchronous(1), turns, 12),
               bound_3 = step_s(asynchronous(3), turns, 12);
  // Of four steps a rank is slow in one: 3 + 1 + 1 + 1 units.
  CHECK_THAT(bound_3, WithinRel(1.5 * plain, 3e-2));
  // The nearer the bound, the longer ranks wait.
  CHECK(bound_1 > 1.02 * bound_3);
  CHECK(bound_0 > 1.02 * bound_1);
  CHECK_THAT(bound_0, WithinRel(3 * plain, 3e-2));
}

TEST_CASE("slow devices are read from a cluster's file", "[graphs][predict][cluster]") {
  const sg::Cluster cluster =
      cluster_of(R"(, "slow": [{"rank": 1, "factor": 2}, {"rank": 3, "factor": 1.5}], "slow_in_turns": 4)");
  CHECK(cluster.slow == std::map<int, double>{{1, 2.0}, {3, 1.5}});
  CHECK(cluster.slow_in_turns == 4);
  CHECK(cluster_of("").slow.empty());
}

TEST_CASE("slow devices that cannot be are refused", "[graphs][predict][cluster][refuses]") {
  const auto refusal = [](const std::string& more) {
    try {
      static_cast<void>(cluster_of(more));
    } catch (const sg::Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  CHECK_THAT(refusal(R"(, "slow": {"rank": 1})"), ContainsSubstring("slow: ") && ContainsSubstring("is not a list"));
  CHECK_THAT(refusal(R"(, "slow": [{"rank": 4, "factor": 2}])"), ContainsSubstring("slow[0].rank: 4"));
  CHECK_THAT(refusal(R"(, "slow": [{"rank": 0}])"), ContainsSubstring("slow[0].factor: missing"));
  CHECK_THAT(refusal(R"(, "slow": [{"rank": 0, "factor": 0}])"), ContainsSubstring("slow[0].factor: 0"));
  CHECK_THAT(refusal(R"(, "slow": [{"rank": 0, "factor": 2}, {"rank": 0, "factor": 3}])"),
             ContainsSubstring("slow[1].rank: 0 is there twice"));
  CHECK_THAT(refusal(R"(, "slow_in_turns": 0)"), ContainsSubstring("slow_in_turns: 0"));
  CHECK_THROWS_MATCHES(sg::cluster_machine(cluster_of(R"(, "slow": [{"rank": 3, "factor": 2}])"), 2, sg::DType::f32),
                       sg::Error,
                       MessageMatches(ContainsSubstring("cluster: slow: rank 3 is not in the layout (0 to 1)")));
}
