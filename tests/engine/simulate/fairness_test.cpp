#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <map>

#include "engine/simulate/sharing.hpp"
#include "engine/simulate/traffic.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/scale.hpp"

// The simulator's internals against their definitions.
namespace sg  = stepgraph;
namespace sim = stepgraph::simulator;
using sg::testing::Random;

namespace {

bool close(double a, double b) { return std::abs(a - b) <= 1e-9 * std::max({1.0, std::abs(a), std::abs(b)}); }

// Activities with random demands on resources, and nothing else.
struct Drawn {
  sim::Activities activities;
  std::vector<double> caps;  // by activity
};

Drawn random_demands(Random& random) {
  Drawn out;
  const auto num_resources = random.between(1, 8), num_activities = random.between(1, 12);
  for (std::int64_t i = 0; i < num_resources; ++i)
    out.activities.capacities.push_back(static_cast<double>(random.between(1, 100)));
  for (std::int64_t i = 0; i < num_activities; ++i) {
    out.activities.node_begin.push_back(0);
    for (std::uint32_t resource = 0; resource < num_resources; ++resource) {
      if (random.chance(35)) out.activities.demands.push_back({resource, static_cast<double>(random.between(1, 50))});
    }
    const bool demands = out.activities.demands.size() > out.activities.demand_begin.back();
    out.activities.demand_begin.push_back(static_cast<std::uint32_t>(out.activities.demands.size()));
    out.caps.push_back(demands && random.chance(50) ? sg::unlimited : static_cast<double>(random.between(1, 40)) / 10);
  }
  return out;
}

// The definition of max-min fairness: no resource exceeds its capacity, and every activity below its cap has a full
// resource on which no other activity gets more.
bool is_fair(const Drawn& drawn, const std::map<std::uint32_t, double>& rates) {
  const sim::Activities& activities = drawn.activities;
  std::vector<double> used(activities.capacities.size());
  std::vector<double> best(used), level(activities.size());
  for (const auto& [activity, rate] : rates) {
    for (const sim::Demand& demand : activities.demands_of(activity))
      level[activity] = std::max(level[activity], rate * demand.amount);
    for (const sim::Demand& demand : activities.demands_of(activity)) {
      used[demand.resource] += rate * demand.amount;
      best[demand.resource] = std::max(best[demand.resource], level[activity]);
    }
  }
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (used[i] > activities.capacities[i] * (1 + 1e-9)) return false;
  }
  return std::all_of(rates.begin(), rates.end(), [&](const auto& entry) {
    const auto& [activity, rate] = entry;
    if (close(rate, drawn.caps[activity])) return true;
    const auto demands = activities.demands_of(activity);
    return rate < drawn.caps[activity] && std::any_of(demands.begin(), demands.end(), [&](const sim::Demand& demand) {
             return close(used[demand.resource], activities.capacities[demand.resource]) &&
                    level[activity] >= best[demand.resource] * (1 - 1e-9);
           });
  });
}

}  // namespace

TEST_CASE("rates are max-min fair, and stay so as work begins, ends and changes its speed",
          "[engine][simulate][property]") {
  bool fair = true;
  for (int seed = 0; seed < sg::testing::cases(2000); ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    Drawn drawn = random_demands(random);
    sim::Sharing sharing(drawn.activities);
    std::map<std::uint32_t, double> rates;
    std::vector<sim::Forecast> forecasts;
    // All at time 0, so that a forecast is the inverse of a rate.
    const auto settle = [&] {
      forecasts.clear();
      sharing.settle(0, forecasts);
      for (const sim::Forecast& forecast : forecasts) rates[forecast.activity] = 1 / forecast.end_s;
      fair &= is_fair(drawn, rates);
    };
    for (std::uint32_t i = 0; i < drawn.activities.size(); ++i) {
      sharing.begin(i, drawn.caps[i]);
      if (random.chance(50)) settle();
    }
    settle();
    fair &= rates.size() == drawn.activities.size();
    for (std::uint32_t i = 0; i < drawn.activities.size(); ++i) {
      if (random.chance(30)) {
        drawn.caps[i] = static_cast<double>(random.between(1, 40)) / 10;
        sharing.set_cap(i, drawn.caps[i]);
        settle();
      } else if (random.chance(50)) {
        sharing.end(i);
        rates.erase(i);
        settle();
      }
    }
    CAPTURE(seed);
    REQUIRE(fair);
  }
}

TEST_CASE("demands and latencies equal those of the individual routes", "[engine][simulate][property]") {
  for (int seed = 0; seed < sg::testing::cases(300); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const int num_ranks = static_cast<int>(random.between(1, 12));
    sg::Machine machine(num_ranks);
    const auto link = [&] {
      return sg::Link{static_cast<double>(random.between(0, 8)),
                      random.chance(20) ? sg::unlimited : static_cast<double>(random.between(1, 9))};
    };
    std::vector<sg::SwitchId> switches{machine.root_switch()};
    for (std::int64_t i = random.between(0, 6); i > 0; --i)
      switches.push_back(machine.switch_below(random.pick(switches), link(), link()));
    for (int rank = 0; rank < num_ranks; ++rank) machine.attach(sg::Rank{rank}, random.pick(switches), link(), link());

    sim::Traffic traffic;
    std::vector<sg::Rank> members;
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (!random.chance(70)) continue;
      members.push_back(sg::Rank{rank});
      traffic.sends.push_back(static_cast<double>(random.between(0, 3)));
      traffic.takes.push_back(static_cast<double>(random.between(0, 3)));
    }
    random.shuffle(members);
    traffic.members = members;
    traffic.bytes   = static_cast<double>(random.between(0, 2));
    const auto size = traffic.members.size();
    for (std::size_t i = 0; i < size && random.chance(60); ++i)
      traffic.pairs.push_back({i, random.below(size), static_cast<double>(random.between(1, 5))});

    const auto& tree = machine.network();
    std::map<std::uint32_t, double> expected;
    double largest_s   = 0;
    const auto message = [&](std::size_t from, std::size_t to, double bytes) {
      auto a = static_cast<std::int32_t>(traffic.members[from]), b = static_cast<std::int32_t>(traffic.members[to]);
      double latency_s = 0;
      const auto cross = [&](std::int32_t& at, bool up) {
        const auto& vertex = tree[static_cast<std::size_t>(at)];
        const sg::Link& by = up ? vertex.up : vertex.down;
        latency_s += by.latency_s;
        if (bytes > 0 && std::isfinite(by.bytes_per_s))
          expected[3 + 2 * static_cast<std::uint32_t>(at) + (up ? 0 : 1)] += bytes;
        at = vertex.above;
      };
      while (a != b)
        tree[static_cast<std::size_t>(a)].depth > tree[static_cast<std::size_t>(b)].depth ? cross(a, true)
                                                                                          : cross(b, false);
      largest_s = std::max(largest_s, latency_s);
    };
    for (std::size_t i = 0; i < size; ++i) {
      for (std::size_t j = 0; j < size; ++j) {
        if (i != j && traffic.sends[i] > 0 && traffic.takes[j] > 0)
          message(i, j, traffic.bytes * traffic.sends[i] * traffic.takes[j]);
      }
    }
    for (const sim::Traffic::Pair& pair : traffic.pairs) message(pair.from, pair.to, pair.bytes);

    sim::Network network(machine, 3);
    for (int again = 0; again < 2; ++again) {  // no state is left behind
      std::vector<sim::Demand> demands;
      network.add_demands(traffic, demands);
      std::map<std::uint32_t, double> found;
      for (const sim::Demand& demand : demands) found[demand.resource] += demand.amount;
      CHECK(found == expected);
      CHECK(network.largest_latency(traffic) == largest_s);
    }
  }
}
