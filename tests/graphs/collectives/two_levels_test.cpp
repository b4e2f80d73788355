#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <map>
#include <vector>

#include "engine/simulate/simulate.hpp"
#include "graphs/collectives/algorithms.hpp"
#include "tests/support/conformance/one_collective.hpp"

namespace sg = stepgraph;
using sg::Algorithm;
using sg::testing::one_collective;

namespace {

// A two-level network, and closed forms for the time of an all-reduce on it. Sizes are powers of two.
struct TwoLevels {
  double nodes = 8, per_node = 8;
  double inside_latency = 1e-6, between_latency = 5e-6, overhead = 1e-7;
  double inside_s = 1 / 100e9, between_s = 1 / 25e9;  // per byte

  [[nodiscard]] double n() const { return nodes * per_node; }
  [[nodiscard]] sg::Machine machine() const {
    return sg::two_level_machine({.ranks              = static_cast<int>(n()),
                                  .ranks_per_node     = static_cast<int>(per_node),
                                  .inside             = {inside_latency, 1 / inside_s},
                                  .between            = {between_latency, 1 / between_s},
                                  .message_overhead_s = overhead});
  }
  [[nodiscard]] double inside(double bytes) const { return inside_latency + overhead + bytes * inside_s; }
  // `flows` messages leave a node through its NIC at the same time.
  [[nodiscard]] double between(double bytes, double flows = 1) const {
    return between_latency + overhead + std::max(bytes * inside_s, flows * bytes * between_s);
  }
  [[nodiscard]] double all_reduce(Algorithm algorithm, double bytes) const {
    switch (algorithm) {
      case Algorithm::ring:  // in each round, one message leaves each node
        return 2 * (n() - 1) * between(bytes / n());
      case Algorithm::tree:
        return 2 * (std::log2(per_node) * inside(bytes) + std::log2(nodes) * between(bytes));
      case Algorithm::hierarchical:
        return 2 * (per_node - 1) * inside(bytes / per_node) + 2 * (nodes - 1) * between(bytes / n(), per_node);
      default: {  // every rank sends a share to every other rank, twice
        const double port  = 2 * (n() - 1) * bytes / n() * inside_s;
        const double cable = 2 * per_node * (n() - per_node) * bytes / n() * between_s;
        return 2 * between_latency + 2 * (n() - 1) * overhead + std::max(port, cable);
      }
    }
  }
};

constexpr Algorithm all_forms[] = {Algorithm::direct, Algorithm::ring, Algorithm::tree, Algorithm::hierarchical};

}  // namespace

TEST_CASE("on a two-level network each all-reduce algorithm takes the time of its closed form",
          "[graphs][algorithms]") {
  const TwoLevels theory;
  const sg::Machine machine = theory.machine();
  std::vector<Algorithm> winners;
  for (const std::int64_t bytes : {1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28}) {
    CAPTURE(bytes);
    const auto made = one_collective({.ranks = 64, .elements = bytes / 4, .in_place = true});
    std::map<double, Algorithm> simulated, predicted;
    for (const Algorithm algorithm : all_forms) {
      CAPTURE(algorithm);
      const auto graph    = sg::expand_collectives(made.graph, {.algorithm = algorithm, .ranks_per_node = 8});
      const double time   = sg::simulate(graph, machine).makespan_s;
      const double closed = theory.all_reduce(algorithm, static_cast<double>(bytes));
      CHECK(std::abs(time / closed - 1) < 1e-9);
      simulated[time]   = algorithm;
      predicted[closed] = algorithm;
    }
    CHECK(simulated.begin()->second == predicted.begin()->second);
    const auto adaptive = sg::expand_collectives(
        made.graph, {.algorithm = Algorithm::adaptive, .ranks_per_node = 8, .machine = &machine});
    CHECK(sg::simulate(adaptive, machine).makespan_s == simulated.begin()->first);
    winners.push_back(simulated.begin()->second);
    CHECK(sg::form_of(made.graph, {0}, {.algorithm = Algorithm::adaptive, .ranks_per_node = 8, .machine = &machine}) ==
          winners.back());
  }
  // By size: the fewest hops win, then the tree, then the fewest bytes between nodes, then the algorithm that keeps all
  // links busy.
  CHECK(winners == std::vector{Algorithm::direct, Algorithm::tree, Algorithm::hierarchical, Algorithm::hierarchical,
                               Algorithm::ring});
}
