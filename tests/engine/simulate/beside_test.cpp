// Lanes that slow each other down.
#include <array>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "engine/simulate/machine.hpp"
#include "engine/simulate/simulate.hpp"

namespace sg = stepgraph;
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

constexpr auto h2d = sg::LaneKind::h2d, d2h = sg::LaneKind::d2h, host = sg::LaneKind::host;

// Nodes on lanes of one rank that depend on nothing: a megabyte takes a second.
struct Lanes {
  sg::Graph graph{1};
  sg::Machine machine{1};
  Lanes() {
    for (const sg::NodeKind kind : {sg::NodeKind::copy, sg::NodeKind::host, sg::NodeKind::compute})
      machine.rate(kind, sg::Rate{.bytes_per_s = 1e6});
  }
  sg::Node add(sg::LaneKind lane, double seconds) {
    return graph.add({.lane = graph.lane(sg::Rank{0}, lane),
                      .kind = lane == host ? sg::NodeKind::host : sg::NodeKind::copy,
                      .cost = {.bytes_moved = 1e6 * seconds}});
  }
};

}  // namespace

TEST_CASE("lanes slow each other down while both have nodes", "[engine][simulate]") {
  Lanes lanes;
  const sg::Node copy = lanes.add(h2d, 2), update = lanes.add(host, 3);
  lanes.machine.beside(host, std::array{h2d}, 2);
  const sg::Timeline found = sg::simulate(lanes.graph, lanes.machine);
  // Half of two seconds beside the copy, then two seconds alone.
  CHECK(found.nodes[copy.id].end_s == Approx(2));
  CHECK(found.nodes[update.id].end_s == Approx(4));

  lanes.machine.beside(h2d, std::array{host}, 1.5);
  const sg::Timeline both = sg::simulate(lanes.graph, lanes.machine);
  CHECK(both.nodes[copy.id].end_s == Approx(3));
  CHECK(both.nodes[update.id].end_s == Approx(4.5));
}

TEST_CASE("the largest slow-down whose lanes are all busy applies", "[engine][simulate]") {
  Lanes lanes;
  const sg::Node up = lanes.add(h2d, 1), down = lanes.add(d2h, 2), update = lanes.add(host, 2);
  lanes.machine.beside(host, std::array{h2d}, 1.25);
  lanes.machine.beside(host, std::array{d2h}, 2);
  lanes.machine.beside(host, std::array{h2d, d2h}, 4);
  const sg::Timeline found = sg::simulate(lanes.graph, lanes.machine);
  CHECK(found.nodes[up.id].end_s == Approx(1));
  CHECK(found.nodes[down.id].end_s == Approx(2));
  CHECK(found.nodes[update.id].end_s == Approx(2 + 2 - 0.25 - 0.5));
  CHECK(lanes.machine.slowdown(host, 0) == 1);
  CHECK(lanes.machine.slowdown(h2d, sg::Machine::bit(host)) == 1);
}

TEST_CASE("an op has another table on the host than on a device", "[engine][simulate]") {
  sg::Graph graph(1);
  const auto add = [&](std::optional<sg::LaneKind> lane, sg::NodeKind kind) {
    return graph.add({.lane = lane ? std::optional(graph.lane(sg::Rank{0}, *lane)) : std::nullopt,
                      .kind = kind,
                      .op   = "adamw",
                      .cost = {.bytes_moved = 100},
                      .rank = sg::Rank{0}});
  };
  const sg::Node there = add({}, sg::NodeKind::compute), here = add(host, sg::NodeKind::host);
  sg::Machine machine(1);
  machine.rate("adamw", sg::RateTable({{0, 100, 3, 3}}));
  machine.rate("adamw", sg::NodeKind::host, sg::RateTable({{0, 100, 5, 5}}));
  const sg::Timeline found = sg::simulate(graph, machine);
  CHECK(found.nodes[there.id].end_s == Approx(3));
  CHECK(found.nodes[here.id].end_s == Approx(5));
  CHECK(machine.table_of("adamw", sg::NodeKind::copy)->at(0, 100).alone_s == 3);
}

TEST_CASE("slow-downs beside no lanes or below one are refused", "[engine][simulate][refuses]") {
  sg::Machine machine(1);
  const auto refuses = [&](sg::LaneKind lane, std::vector<sg::LaneKind> others, double factor, const char* why) {
    CHECK_THROWS_MATCHES(machine.beside(lane, others, factor), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  refuses(h2d, {}, 2, "lane h2d beside 0 lanes");
  refuses(h2d, {h2d}, 2, "of other kinds than its own");
  refuses(h2d, {host}, 0.5, "slower by a factor of 0.5 (1 or more");
}
