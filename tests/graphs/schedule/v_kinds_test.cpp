// Kinds in V placement: zb-v, v-half, v-min and dualpipe-v.
#include <algorithm>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>

#include "engine/base/error.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/schedule/csv.hpp"
#include "graphs/schedule/drawing.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/simulation.hpp"
#include "graphs/schedule/validate.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/schedules/schedules.hpp"

namespace sg = stepgraph;
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::ScheduleKind;

namespace {

constexpr ScheduleKind v_kinds[] = {ScheduleKind::zb_v, ScheduleKind::v_half, ScheduleKind::v_min,
                                    ScheduleKind::dualpipe_v};

double highest(const std::vector<double>& peaks) { return *std::max_element(peaks.begin(), peaks.end()); }

double bubble(ScheduleKind kind, int ranks, int microbatches, const sg::Costs& costs = {}) {
  return sg::simulate(sg::pipeline_schedule(kind, {ranks, microbatches}), {.costs = {costs}}).bubble_rate;
}

}  // namespace

// The files were written by a short Python program that follows _calculate_single_rank_operations of
// ScheduleZBVZeroBubble and ScheduleDualPipeV (torch/distributed/pipelining/schedules.py), with each overlapped pair of
// DualPipeV written as F, then B, and idle slots left out. The program shares no code with this library.
TEST_CASE("zb-v and dualpipe-v have the actions of torch.distributed.pipelining", "[graphs][schedule]") {
  const auto [kind, ranks, microbatches] = GENERATE(table<ScheduleKind, int, int>({
      {ScheduleKind::zb_v, 1, 2},
      {ScheduleKind::zb_v, 2, 4},
      {ScheduleKind::zb_v, 2, 2},
      {ScheduleKind::zb_v, 4, 8},
      {ScheduleKind::zb_v, 4, 3},
      {ScheduleKind::zb_v, 5, 12},
      {ScheduleKind::dualpipe_v, 1, 2},
      {ScheduleKind::dualpipe_v, 2, 4},
      {ScheduleKind::dualpipe_v, 3, 7},
      {ScheduleKind::dualpipe_v, 4, 8},
      {ScheduleKind::dualpipe_v, 4, 12},
  }));
  CAPTURE(kind, ranks, microbatches);
  const auto golden = sg::read_csv(
      sg::str(sg::testing::source_path(), "/tests/data/schedules/", kind, "-", ranks, "x", microbatches, ".csv"));
  CHECK(sg::pipeline_schedule(kind, {ranks, microbatches}) == golden);
}

TEST_CASE("V placement puts stages r and 2P-1-r on rank r", "[graphs][schedule]") {
  CHECK(sg::v_placement(1) == std::vector{sg::Rank{0}, sg::Rank{0}});
  CHECK(sg::v_placement(3) ==
        std::vector{sg::Rank{0}, sg::Rank{1}, sg::Rank{2}, sg::Rank{2}, sg::Rank{1}, sg::Rank{0}});
  for (const ScheduleKind kind : v_kinds) CHECK(sg::placement_of(kind, 5) == sg::v_placement(5));
  CHECK(sg::placement_of(ScheduleKind::gpipe, 2, 2) == sg::looped_placement(2, 2));
  CHECK(sg::placement_of(ScheduleKind::zb_h1, 3) == sg::looped_placement(3, 1));
}

TEST_CASE("V kinds can run with any number of ranks and microbatches, and read back from CSV", "[graphs][schedule]") {
  const ScheduleKind kind = GENERATE(from_range(v_kinds));
  for (int ranks = 1; ranks <= 13; ++ranks) {
    for (const int microbatches : {1, 2, 3, 4, 7, 8, 19, 40}) {
      CAPTURE(kind, ranks, microbatches);
      const auto schedule = sg::pipeline_schedule(kind, {ranks, microbatches});
      REQUIRE(schedule.num_stages() == 2 * ranks);
      REQUIRE(schedule.num_microbatches == microbatches);
      REQUIRE(sg::validate(schedule).weights_in_order);
      REQUIRE(sg::parse_csv(sg::to_csv(schedule)) == schedule);
    }
  }
}

TEST_CASE("V kinds take the time of the reference simulation, and their graphs are sound", "[graphs][schedule]") {
  const ScheduleKind kind = GENERATE(from_range(v_kinds));
  const int ranks = GENERATE(1, 2, 3, 4, 7), microbatches = GENERATE(1, 3, 8, 17);
  CAPTURE(kind, ranks, microbatches);
  const auto schedule = sg::pipeline_schedule(kind, {ranks, microbatches});
  std::vector<sg::Costs> costs;
  for (int rank = 0; rank < ranks; ++rank) costs.push_back({1 + 0.25 * (rank % 3), 1.5, 0.5 + 0.25 * (rank % 2), 0.25});
  const auto timeline = sg::simulate(schedule, {.costs = costs});
  const auto expected = sg::testing::reference_times(schedule, costs);
  for (std::size_t rank = 0; rank < expected.size(); ++rank) {
    REQUIRE(timeline.rows[rank].size() == expected[rank].size());
    for (std::size_t i = 0; i < expected[rank].size(); ++i) {
      REQUIRE(timeline.rows[rank][i].begin_s == Approx(expected[rank][i].begin_s).margin(1e-12));
      REQUIRE(timeline.rows[rank][i].end_s == Approx(expected[rank][i].end_s).margin(1e-12));
    }
  }
  CHECK_NOTHROW(sg::verify(sg::schedule_graph(schedule, costs).graph));
  CHECK_THAT(sg::gantt_svg(schedule, timeline, "V"), ContainsSubstring(sg::str(2 * ranks - 1, "F0")));
}

TEST_CASE("the peaks of V kinds are what they promise", "[graphs][schedule]") {
  for (int ranks = 1; ranks <= (sg::testing::sanitized() ? 12 : 33); ++ranks) {
    for (const int microbatches : {1, 2, ranks, 2 * ranks, 3 * ranks + 1, 4 * ranks + 8}) {
      CAPTURE(ranks, microbatches);
      const auto peak = [&](ScheduleKind kind) {
        return highest(sg::peak_activations(sg::pipeline_schedule(kind, {ranks, microbatches})));
      };
      const double half = peak(ScheduleKind::v_half), third = peak(ScheduleKind::v_min);
      REQUIRE(half <= (ranks + 2) / 2.0);
      REQUIRE(third <= (ranks + 4) / 3.0 + 0.25);  // a whole number of chunks
      REQUIRE(peak(ScheduleKind::zb_v) <= ranks);
      REQUIRE(peak(ScheduleKind::dualpipe_v) <= ranks + 0.5);
      if (microbatches < 2 * ranks + 2) continue;  // no steady state
      REQUIRE(std::abs(half - (ranks + 2) / 2.0) <= 0.5);
      REQUIRE(std::abs(third - (ranks + 4) / 3.0) <= 0.5);
      REQUIRE(peak(ScheduleKind::zb_v) == ranks);
      REQUIRE(peak(ScheduleKind::dualpipe_v) == ranks + 0.5);
    }
  }
}

TEST_CASE("zb-v has no bubble; v-half and v-min have a smaller one than 1F1B", "[graphs][schedule]") {
  for (int ranks = 2; ranks <= (sg::testing::sanitized() ? 8 : 24); ++ranks) {
    for (const int microbatches : {2 * ranks, 4 * ranks, 6 * ranks + 1}) {
      CAPTURE(ranks, microbatches);
      const double usual = bubble(ScheduleKind::one_f_one_b, ranks, microbatches);
      CHECK(bubble(ScheduleKind::zb_v, ranks, microbatches) == Approx(0).margin(1e-12));
      CHECK(bubble(ScheduleKind::v_half, ranks, microbatches) < 0.62 * usual);
      CHECK(bubble(ScheduleKind::v_min, ranks, microbatches) < 0.8 * usual);
      CHECK(bubble(ScheduleKind::v_half, ranks, microbatches) <= bubble(ScheduleKind::v_min, ranks, microbatches));
      CHECK(bubble(ScheduleKind::dualpipe_v, ranks, microbatches) < usual);
    }
  }
}

TEST_CASE("V kinds have two chunks, and no other number", "[graphs][schedule][refuses]") {
  for (const ScheduleKind kind : v_kinds) {
    CAPTURE(kind);
    CHECK(sg::pipeline_schedule(kind, {3, 5, 2}) == sg::pipeline_schedule(kind, {3, 5}));
    for (const int chunks : {1, 3}) {
      CHECK_THROWS_MATCHES(sg::pipeline_schedule(kind, {3, 5, chunks}), sg::Error,
                           MessageMatches(ContainsSubstring(" (2: rank r has stages r and 2 x ranks - 1 - r)")));
    }
  }
}
