#include "graphs/predict/rate_fit.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <utility>
#include <vector>

namespace trials = stepgraph::trials;
using Catch::Matchers::WithinRel;
using trials::Sample;

namespace {

// The time of a node that takes 16 s without help and 2 s with all of it.
double seconds(double helped_share) { return 1 / ((1 - helped_share) / 16 + helped_share / 2); }

}  // namespace

TEST_CASE("the times of a node with no help and with all follow from little help and much", "[graphs][predict]") {
  for (const auto& [low, high] : {std::pair{0.0, 1.0}, std::pair{0.0, 7.0 / 15}, std::pair{0.1, 0.9}}) {
    const std::vector<Sample> samples{{low, seconds(low)}, {high, seconds(high)}, {low, seconds(low)}};
    const auto times = trials::times_on_line(samples, 15);
    REQUIRE(times);
    CHECK_THAT(times->busy_s, WithinRel(16, 1e-9));
    CHECK_THAT(times->alone_s, WithinRel(2, 1e-9));
  }
}

TEST_CASE("nodes that always had much help need the ratio of other nodes", "[graphs][predict]") {
  const double share = 7.0 / 15;                                    // two nodes on 16 threads
  const std::vector<Sample> samples{{share, 77}, {1, seconds(1)}};  // the one with most help counts
  CHECK_FALSE(trials::times_on_line(samples, 15));
  CHECK(trials::times_by_ratio(samples, 8).alone_s == 2);
  const auto times = trials::times_by_ratio(std::vector<Sample>{{share, seconds(share)}}, 8);
  CHECK_THAT(times.busy_s, WithinRel(16, 1e-9));
  CHECK_THAT(times.alone_s, WithinRel(2, 1e-9));
}

TEST_CASE("a node that is faster among busy workers keeps a positive speed at both ends", "[graphs][predict]") {
  const std::vector<Sample> samples{{0.2, 1}, {1, 8}};
  const auto times = trials::times_on_line(samples, 15);
  REQUIRE(times);
  CHECK_THAT(times->busy_s, WithinRel(1 / (1 + 0.25 * 7 / 8), 1e-9));
  CHECK_THAT(times->alone_s, WithinRel(8, 1e-9));
  const auto falling = trials::times_on_line(std::vector<Sample>{{0, 1}, {0.5, 4}}, 15);
  REQUIRE(falling);
  CHECK_THAT(falling->alone_s, WithinRel(8, 1e-9));  // not a negative speed
}

TEST_CASE("times above three times the median do not count", "[graphs][predict]") {
  CHECK(trials::usual_seconds({2, 90, 4}) == 3);
  CHECK(trials::usual_seconds({2, 4}) == 3);
  CHECK(trials::usual_seconds({2}) == 2);
  CHECK(trials::usual_seconds({2, 90}) == 2);  // the lower of the two in the middle
  CHECK(trials::usual_seconds({1, 1, 1, 1, 1, 1, 1, 1, 1, 3}) == 1.2);
  CHECK(trials::usual_seconds({1, 1, 1, 1, 5, 5, 5, 5, 99, 77, 1, 5, 3}) == 3);
  const std::vector<Sample> samples{{1, 2}, {1, 2}, {1, 2}, {1, 90}, {0, 16}, {0, 16}, {0, 80}};
  const auto times = trials::times_on_line(samples, 15);
  REQUIRE(times);
  CHECK_THAT(times->busy_s, WithinRel(16, 1e-9));
  CHECK_THAT(times->alone_s, WithinRel(2, 1e-9));
}

TEST_CASE("the time with some help comes from samples with about as much", "[graphs][predict]") {
  const trials::Helped none{0, 16}, all{1, 2};
  const double one = 1.0 / 7;
  CHECK_THAT(trials::seconds_on_line(none, all, one), WithinRel(8, 1e-9));  // speeds 1/16 and 8/16
  CHECK_FALSE(trials::seconds_between(std::vector<Sample>{{0, 16}, {1, 2}}, none, all, one));
  CHECK_FALSE(trials::seconds_between(std::vector<Sample>{{0, 16}, {1, 2}, {1, 2}}, none, all, 0.5));  // three threads
  // The speed is 1/10 with one helper: between 1/16 and that with half a helper, between that and 1/2 with two.
  const double half = 1 / ((1.0 / 16 + 1.0 / 10) / 2), two = 1 / (1.0 / 10 + (1.0 / 2 - 1.0 / 10) / 6);
  for (const Sample& sample : {Sample{one, 10}, Sample{one / 2, half}, Sample{2 * one, two}}) {
    const auto found = trials::seconds_between(std::vector<Sample>{{0, 16}, sample, {1, 2}}, none, all, one);
    REQUIRE(found);
    CHECK_THAT(*found, WithinRel(10, 1e-9));
  }
  // The speed is 1/3 with 3 of 7: that with 4 is between that and 1/2.
  const std::vector<Sample> samples{{one, 10}, {4 * one, 1 / (1.0 / 3 + (1.0 / 2 - 1.0 / 3) / 4)}, {1, 2}};
  const auto found = trials::seconds_between(samples, {one, 10}, all, 3 * one);
  REQUIRE(found);
  CHECK_THAT(*found, WithinRel(3, 1e-9));
  // Samples above the bound do not count.
  const std::vector<Sample> mixed{{one, 10}, {2 * one, 3}, {2 * one, 3}};
  CHECK_THAT(*trials::seconds_between(mixed, none, all, one, 1.5 * one), WithinRel(10, 1e-9));
  // A node that is slow with half a helper is not four times as slow as it was with one.
  const std::vector<Sample> slow{{0, 16}, {one / 2, 30}, {1, 2}};
  CHECK_THAT(*trials::seconds_between(slow, none, all, one), WithinRel(60, 1e-9));
}

namespace {

// Samples of a node that takes `seconds` with no help, with one helper, with half of all and with all of 15.
std::vector<Sample> at_four(double busy, double paired, double halved, double alone) {
  return {{0, busy}, {1.0 / 15, paired}, {7.0 / 15, halved}, {1, alone}};
}

void check(const stepgraph::RatePoint& point, double busy, double paired, double halved, double alone) {
  CHECK_THAT(point.busy_s, WithinRel(busy, 1e-9));
  CHECK_THAT(point.paired_s, WithinRel(paired, 1e-9));
  CHECK_THAT(point.halved_s, WithinRel(halved, 1e-9));
  CHECK_THAT(point.alone_s, WithinRel(alone, 1e-9));
}

}  // namespace

TEST_CASE("times that were not measured for a size are those of other sizes and ops", "[graphs][predict]") {
  trials::NodeSamples samples{{{"mul", 1e6, 0}, at_four(16, 9, 3, 2)},
                              {{"mul", 2e6, 0}, {{0, 32}, {1, 4}}},
                              {{"add", 1e6, 0}, {{0, 160}, {1, 20}}},
                              {{"mul", 4e6, 0}, {{1, 8}}},
                              {{"h2d", 0, 1e6}, {{0, 16}, {1, 2}}}};
  const auto points = trials::fitted_points(samples, 15);
  REQUIRE(points.at("mul").size() == 3);
  check(points.at("mul")[0], 16, 9, 3, 2);
  check(points.at("mul")[1], 32, 18, 6, 4);
  check(points.at("mul")[2], 64, 36, 12, 8);
  check(points.at("add")[0], 160, 90, 30, 20);  // no size of its own: as other ops
  const double paired = 1 / (1.0 / 16 + (1.0 / 2 - 1.0 / 16) / 15);
  check(points.at("h2d")[0], 16, paired, 1 / (1 / paired + 6.0 / 14 * (1.0 / 2 - 1 / paired)), 2);  // on the line

  // A node that never had all help has times of its own, but is no example for others.
  samples[{"mul", 3e6, 0}] = {{0, 48}, {1.0 / 15, 48}, {7.0 / 15, 48}};
  const auto more          = trials::fitted_points(samples, 15);
  CHECK_THAT(more.at("mul")[2].halved_s, WithinRel(48, 1e-9));
  check(more.at("mul")[3], 64, 36, 12, 8);
}

TEST_CASE("a point has a time with one helper from three workers on, and one beside one node from five on",
          "[graphs][predict]") {
  for (const int others : {1, 2, 3, 4, 5, 15}) {
    CAPTURE(others);
    const auto points                 = trials::fitted_points({{{"mul", 1e6, 0}, {{0, 16}, {1, 2}}}}, others);
    const stepgraph::RatePoint& point = points.at("mul").front();
    CHECK((point.paired_s > 0) == (others > 1));
    CHECK((point.halved_s > 0) == (others > 3));
  }
  // Of five others, two nodes have two each: that is not about one.
  const std::vector<Sample> samples{{0, 16}, {0.2, 10}, {0.4, 3}, {0.4, 3}, {0.4, 3}, {1, 2}};
  check(trials::fitted_points({{{"mul", 1e6, 0}, samples}}, 5).at("mul").front(), 16, 10, 3, 2);
}
