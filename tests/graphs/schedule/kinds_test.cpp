#include "graphs/schedule/kinds.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <fstream>
#include <sstream>

#include "engine/base/error.hpp"
#include "graphs/schedule/simulation.hpp"
#include "graphs/schedule/validate.hpp"
#include "tests/support/paths.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::ScheduleKind;

TEST_CASE("schedules equal the golden files", "[graphs][schedule]") {
  const auto [name, kind, spec] = GENERATE(table<std::string, ScheduleKind, sg::ScheduleSpec>({
      {"round-robin-2x2x2", ScheduleKind::round_robin, {2, 2, 2}},
      {"sequential-3x2", ScheduleKind::sequential, {3, 2}},
      {"gpipe-2x3x2", ScheduleKind::gpipe, {2, 3, 2}},
      {"1f1b-4x8", ScheduleKind::one_f_one_b, {4, 8}},
      {"1f1b-4x2", ScheduleKind::one_f_one_b, {4, 2}},
      {"interleaved-4x8x2", ScheduleKind::interleaved, {4, 8, 2}},
      {"interleaved-2x2x3", ScheduleKind::interleaved, {2, 2, 3}},
      {"zb-h1-4x8", ScheduleKind::zb_h1, {4, 8}},
      {"zb-h2-4x8", ScheduleKind::zb_h2, {4, 8}},
  }));
  CAPTURE(name);
  std::ifstream file(sg::str(sg::testing::source_path(), "/tests/data/schedules/", name, ".txt"));
  REQUIRE(file);
  std::ostringstream text;
  text << file.rdbuf();
  CHECK(sg::to_string(sg::pipeline_schedule(kind, spec)) == text.str());
  CHECK(sg::parse_schedule(text.str()) == sg::pipeline_schedule(kind, spec));
}

TEST_CASE("interleaved with one chunk equals 1F1B, for any number of microbatches", "[graphs][schedule]") {
  for (const int microbatches : {1, 3, 4, 7}) {
    const sg::ScheduleSpec spec{.ranks = 4, .microbatches = microbatches};
    CHECK(sg::pipeline_schedule(ScheduleKind::interleaved, spec) ==
          sg::pipeline_schedule(ScheduleKind::one_f_one_b, spec));
  }
}

TEST_CASE("ranks hold as many activations as the schedule promises", "[graphs][schedule]") {
  const int p = GENERATE(1, 2, 3, 8), m = GENERATE(1, 2, 3, 8, 24);
  CAPTURE(p, m);
  const auto peaks = [&](ScheduleKind kind, int chunks = 1) {
    return sg::peak_activations(sg::pipeline_schedule(kind, {p, m, chunks}));
  };
  for (int s = 0; s < p; ++s) {
    const auto rank = static_cast<std::size_t>(s);
    CAPTURE(s);
    CHECK(peaks(ScheduleKind::one_f_one_b)[rank] == std::min(m, p - s));
    CHECK(peaks(ScheduleKind::zb_h1)[rank] == std::min(m, p));
    CHECK(peaks(ScheduleKind::zb_h2)[rank] == std::min(m, 2 * p - 1));
    for (const int chunks : {1, 2}) {
      CHECK(peaks(ScheduleKind::gpipe, chunks)[rank] == m);
      CHECK(peaks(ScheduleKind::sequential, chunks)[rank] == m);
      CHECK(peaks(ScheduleKind::round_robin, chunks)[rank] == 1);
    }
    if (m % p != 0) continue;
    for (const int chunks : {2, 3}) {  // Megatron-LM: the chunks of the warm-up and one more
      CHECK(peaks(ScheduleKind::interleaved, chunks)[rank] ==
            std::min(m * chunks, 2 * (p - 1 - s) + (chunks - 1) * p + 1) / static_cast<double>(chunks));
    }
  }
}

TEST_CASE("a share of the activations is held from the end of I to the end of W", "[graphs][schedule]") {
  const auto schedule = sg::parse_schedule("0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2\n");
  CHECK(sg::peak_activations(schedule, 1)[0] == 3);
  CHECK(sg::peak_activations(schedule, 0.5)[0] == 2.5);  // after 0F2: one of three microbatches has done I
  CHECK(sg::peak_activations(schedule, 0)[0] == 2);
  CHECK_THROWS_AS(sg::peak_activations(schedule, 1.5), sg::Error);
}

TEST_CASE("an undefined schedule is refused, with the allowed values", "[graphs][schedule][refuses]") {
  const auto refused = [](ScheduleKind kind, const sg::ScheduleSpec& spec, const std::string& why) {
    CAPTURE(kind, why);
    CHECK_THROWS_MATCHES(sg::pipeline_schedule(kind, spec), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  for (const ScheduleKind kind : sg::all_schedule_kinds) {
    refused(kind, {0, 1, 1}, "0 pipeline ranks (at least 1)");
    refused(kind, {1, 0, 1}, "0 microbatches (at least 1)");
    refused(kind, {1, 1, -2}, "-2 chunks (at least 1)");
    refused(kind, {1 << 20, 1 << 20, 1}, "too many");
    refused(kind, {2, 8, 1 << 20}, "too many (at most 2^21 in all");
    refused(kind, {2147483647, 2147483647, 2147483647}, "too many");
  }
  for (const ScheduleKind kind : {ScheduleKind::one_f_one_b, ScheduleKind::zb_h1, ScheduleKind::zb_h2})
    refused(kind, {4, 8, 2}, "2 chunks (1; ");
  refused(ScheduleKind::interleaved, {4, 6, 2},
          "6 microbatches with 2 chunks on 4 ranks (microbatches a multiple of 4)");
  refused(ScheduleKind::interleaved, {4, 2, 2}, "2 microbatches with 2 chunks on 4 ranks");
  CHECK_THROWS_MATCHES(
      sg::parse_schedule_kind("1f1p"), sg::Error,
      MessageMatches(ContainsSubstring("unknown kind '1f1p' (did you mean 1f1b? known: round-robin, sequential, gpipe, "
                                       "1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe-v)")));
  for (const ScheduleKind kind : sg::all_schedule_kinds) CHECK(sg::parse_schedule_kind(sg::to_string(kind)) == kind);
}

TEST_CASE("all schedules but sequential add weight gradients in the order of microbatches", "[graphs][schedule]") {
  for (const ScheduleKind kind : sg::all_schedule_kinds) {
    CAPTURE(kind);
    CHECK(sg::validate(sg::pipeline_schedule(kind, {4, 8})).weights_in_order == (kind != ScheduleKind::sequential));
  }
}
