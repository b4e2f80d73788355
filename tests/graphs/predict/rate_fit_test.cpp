#include "graphs/predict/rate_fit.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
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
    const auto times = trials::both_times(samples);
    REQUIRE(times);
    CHECK_THAT(times->busy_s, WithinRel(16, 1e-9));
    CHECK_THAT(times->alone_s, WithinRel(2, 1e-9));
  }
}

TEST_CASE("nodes that always had much help need the ratio of other nodes", "[graphs][predict]") {
  const double share = 7.0 / 15;                                    // two nodes on 16 threads
  const std::vector<Sample> samples{{share, 77}, {1, seconds(1)}};  // the one with most help counts
  CHECK_FALSE(trials::both_times(samples));
  CHECK(trials::both_times(samples, 8).alone_s == 2);
  const auto times = trials::both_times(std::vector<Sample>{{share, seconds(share)}}, 8);
  CHECK_THAT(times.busy_s, WithinRel(16, 1e-9));
  CHECK_THAT(times.alone_s, WithinRel(2, 1e-9));
}

TEST_CASE("a node that is faster among busy workers keeps a positive speed at both ends", "[graphs][predict]") {
  const std::vector<Sample> samples{{0.2, 1}, {1, 8}};
  const auto times = trials::both_times(samples);
  REQUIRE(times);
  CHECK(times->busy_s > 0);
  CHECK(times->busy_s < 1);
  CHECK_THAT(times->alone_s, WithinRel(8, 1e-9));
  const auto falling = trials::both_times(std::vector<Sample>{{0, 1}, {0.5, 4}});
  REQUIRE(falling);
  CHECK_THAT(falling->alone_s, WithinRel(8, 1e-9));  // not a negative speed
}

TEST_CASE("slow outliers of one share do not count", "[graphs][predict]") {
  const std::vector<Sample> samples{{1, 2}, {1, 2}, {1, 2}, {1, 90}, {0, 16}, {0, 16}, {0, 80}};
  const auto times = trials::both_times(samples);
  REQUIRE(times);
  CHECK_THAT(times->busy_s, WithinRel(16, 1e-9));
  CHECK_THAT(times->alone_s, WithinRel(2, 1e-9));
}
