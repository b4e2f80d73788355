#include "engine/simulate/rate_table.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <limits>

#include "engine/base/error.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using Catch::Matchers::WithinRel;

TEST_CASE("a rate table returns the measured times, and scales a single point by flops", "[engine][rates]") {
  const sg::RateTable one({{.flops = 1e6, .bytes_moved = 1e4, .busy_s = 2, .alone_s = 1}});
  CHECK(one.at(1e6, 1e4) == sg::RatePoint{1e6, 1e4, 2, 1});
  CHECK_THAT(one.at(3e6, 1e4).busy_s, WithinRel(6.0, 1e-12));
  CHECK_THAT(one.at(3e6, 9e9).alone_s, WithinRel(3.0, 1e-12));
  CHECK_THAT(one.at(0, 2e4).busy_s, WithinRel(4.0, 1e-12));  // no flops: by bytes
  const sg::RateTable paired({{1e6, 1e4, 2, 1, 1.5}, {4e6, 1e4, 8, 4, 6}});
  CHECK(paired.at(4e6, 1e4) == sg::RatePoint{4e6, 1e4, 8, 4, 6});
  CHECK_THAT(paired.at(2e6, 1e4).paired_s, WithinRel(3.0, 1e-12));
  CHECK(sg::RateTable({{1e6, 1e4, 2, 1, 1.5}, {4e6, 1e4, 8, 4}}).at(2e6, 1e4).paired_s == 0);  // not of all
  const sg::RateTable halved({{1e6, 1e4, 2, 1, 1.8, 1.5}, {4e6, 1e4, 8, 4, 7, 6}});
  CHECK(halved.at(4e6, 1e4) == sg::RatePoint{4e6, 1e4, 8, 4, 7, 6});
  CHECK_THAT(halved.at(2e6, 1e4).halved_s, WithinRel(3.0, 1e-12));
  CHECK(sg::RateTable({{1e6, 1e4, 2, 1, 1.8, 1.5}, {4e6, 1e4, 8, 4, 7}}).at(2e6, 1e4).halved_s == 0);
  const sg::RateTable copies({{.bytes_moved = 1000, .busy_s = 2, .alone_s = 2}});
  CHECK_THAT(copies.at(0, 500).busy_s, WithinRel(1.0, 1e-12));
}

TEST_CASE("a point without flops is scaled by bytes", "[engine][rates]") {
  const sg::RatePoint copy{.bytes_moved = 1000, .busy_s = 2, .alone_s = 1};
  CHECK_THAT(sg::RateTable({copy}).at(1e6, 3000).busy_s, WithinRel(6.0, 1e-12));
  CHECK_THAT(sg::RateTable({copy}).at(1e6, 3000).alone_s, WithinRel(3.0, 1e-12));
  // Together with a point that has flops, both give 6 s, and so does the interpolation.
  const sg::RatePoint product{.flops = 5e5, .bytes_moved = 3000, .busy_s = 3, .alone_s = 3};
  CHECK_THAT(sg::RateTable({copy, product}).at(1e6, 3000).busy_s, WithinRel(6.0, 1e-12));
}

TEST_CASE("in a rate table the nearest point dominates", "[engine][rates]") {
  // Per byte: 1 ns in cache, 4 ns beyond.
  const sg::RateTable table({{.bytes_moved = 1 << 20, .busy_s = (1 << 20) * 1e-9, .alone_s = (1 << 20) * 1e-9},
                             {.bytes_moved = 1 << 24, .busy_s = (1 << 24) * 4e-9, .alone_s = (1 << 24) * 4e-9}});
  const auto per_byte = [&](double bytes) { return table.at(0, bytes).busy_s / bytes; };
  CHECK(table.at(0, 1 << 20).busy_s == (1 << 20) * 1e-9);
  CHECK_THAT(per_byte(1 << 22), WithinRel(2e-9, 1e-9));  // halfway in octaves: the geometric mean
  CHECK(per_byte(1 << 21) < 1.05e-9);
  CHECK(per_byte(1 << 23) > 3.8e-9);
  CHECK(per_byte(1 << 10) > 0.99e-9);  // beyond the ends, nearly the rate of the end point
  CHECK(per_byte(1 << 10) < 1.5e-9);
}

TEST_CASE("a rate table refuses points that are not measurements", "[engine][rates][refuses]") {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  CHECK_THROWS_MATCHES(sg::RateTable({}), sg::Error, MessageMatches(ContainsSubstring("has no points")));
  for (const sg::RatePoint& bad :
       {sg::RatePoint{1, 1, 0, 1}, sg::RatePoint{1, 1, 1, -1}, sg::RatePoint{-1, 1, 1, 1}, sg::RatePoint{1, nan, 1, 1},
        sg::RatePoint{1, 1, inf, 1}, sg::RatePoint{1, 1, 1, 1, -1}, sg::RatePoint{1, 1, 1, 1, 1, nan}}) {
    CHECK_THROWS_MATCHES(sg::RateTable({{1, 1, 1, 1}, bad}), sg::Error,
                         MessageMatches(ContainsSubstring("rate table: ") && ContainsSubstring("times above 0")));
  }
}
