#include "tools/bench/training/idle.hpp"

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>

namespace sg = stepgraph;
using Catch::Approx;

TEST_CASE("a device is busy while anything runs, and idle in between, for any order of records", "[tools][bench]") {
  // Three overlapping intervals cover [100, 300). Then [500, 600), which touches [600, 700).
  const sg::bench::Idle idle = sg::bench::idle_of({{600, 700}, {150, 300}, {500, 600}, {100, 250}, {160, 170}});
  CHECK(idle.num_intervals == 5);
  CHECK(idle.span_s == Approx(600e-9));
  CHECK(idle.busy_s == Approx(400e-9));
  CHECK(idle.longest_gap_s == Approx(200e-9));
  CHECK(idle.share() == Approx(1.0 / 3));
}

TEST_CASE("a device with one interval, or none, was never idle", "[tools][bench]") {
  CHECK(sg::bench::idle_of({{5, 9}}).share() == 0);
  CHECK(sg::bench::idle_of({{5, 9}}).longest_gap_s == 0);
  CHECK(sg::bench::idle_of({}).share() == 0);
}
