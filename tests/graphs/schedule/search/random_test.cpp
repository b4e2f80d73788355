// Searches with random numbers: no fixed kind that fits is better, and the result can run.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <random>

#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/search.hpp"
#include "graphs/schedule/simulation.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/schedules/found_schedules.hpp"

namespace sg = stepgraph;
using sg::SearchChunks;
using sg::testing::best_kind_span;
using sg::testing::check_found;
using sg::testing::rounding;

namespace {

// Limits from P/3 to 2P; one cost for all ranks, one for each rank, or one for each stage; half of them with transfers.
sg::ScheduleSearch random_search(std::mt19937_64& random, SearchChunks chunks, int max_ranks, int max_microbatches) {
  const auto draw = [&](double low, double high) { return std::uniform_real_distribution<double>(low, high)(random); };
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  sg::ScheduleSearch search{.ranks = pick(2, max_ranks), .microbatches = pick(2, max_microbatches), .chunks = chunks};
  const double spread = pick(0, 1) == 0 ? 0.2 : 0.8, transfer = pick(0, 1) == 0 ? 0 : draw(0, 1);
  const int way       = pick(0, chunks == SearchChunks::one ? 2 : 4);
  const int num_costs = way == 0 ? 1 : way <= 2 ? search.ranks : 2 * search.ranks;
  search.costs.clear();
  for (int i = 0; i < num_costs; ++i)
    search.costs.push_back(
        {draw(1 - spread, 1 + spread), draw(1 - spread, 1 + spread), draw(1 - spread, 1 + spread), transfer});
  search.limit = std::max(1.0, draw(search.ranks / 3.0, 2.0 * search.ranks));
  if (pick(0, 1) == 0) search.limit = std::floor(2 * search.limit) / 2;
  search.retain   = pick(0, 1) == 0 ? 1 : draw(0.2, 1);
  search.seed     = random();
  search.budget_s = 0.02;
  search.by_clock = false;
  return search;
}

void check_random_cases(SearchChunks chunks, int count, int max_microbatches, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const bool small = sg::testing::sanitized();
  int better       = 0;
  for (int i = 0; i < count; ++i) {
    const sg::ScheduleSearch search = random_search(random, chunks, small ? 6 : 16, small ? 16 : max_microbatches);
    CAPTURE(i, search.ranks, search.microbatches, search.costs.size(), search.limit, search.retain);
    const double of_kinds = best_kind_span(search);
    const auto found      = sg::search_schedule(search);
    check_found(found, search);
    CHECK(found.longest_span <= of_kinds * (1 + rounding));
    better += found.longest_span < 0.999 * of_kinds;
    CHECK_FALSE(found.out_of_time);
  }
  CHECK(better >= count / 2);
}

}  // namespace

TEST_CASE("300 found schedules with one chunk are valid, within their limit, and no worse than fixed kinds",
          "[graphs][schedule][search]") {
  check_random_cases(SearchChunks::one, sg::testing::cases(300), 64, 241);
}

TEST_CASE("found schedules with two chunks are valid, within their limit, and no worse than fixed kinds",
          "[graphs][schedule][search]") {
  check_random_cases(SearchChunks::two, sg::testing::cases(20), 32, 242);
}

TEST_CASE("found schedules with any number of chunks are valid, within their limit, and no worse than fixed kinds",
          "[graphs][schedule][search]") {
  check_random_cases(SearchChunks::any, sg::testing::cases(20), 32, 243);
}

TEST_CASE("at the peaks of V kinds, any number of chunks is no worse than the kind", "[graphs][schedule][search]") {
  for (const sg::ScheduleKind kind :
       {sg::ScheduleKind::zb_v, sg::ScheduleKind::v_half, sg::ScheduleKind::v_min, sg::ScheduleKind::dualpipe_v}) {
    for (const auto& [p, m] : {std::pair{2, 6}, {4, 12}, {6, 14}, {8, 32}}) {
      if (sg::testing::sanitized() && p > 4) continue;
      CAPTURE(kind, p, m);
      sg::ScheduleSearch search{
          .ranks = p, .microbatches = m, .chunks = SearchChunks::any, .budget_s = 0.05, .by_clock = false};
      if (m == 14) search.costs = {{1.2, 1, 0.7, 0.1}};
      const auto timeline = sg::simulate(sg::pipeline_schedule(kind, {.ranks = p, .microbatches = m}), {search.costs});
      search.limit        = *std::max_element(timeline.peak_activation.begin(), timeline.peak_activation.end());
      const auto found    = sg::search_schedule(search);
      check_found(found, search);
      CHECK(found.longest_span <= timeline.longest_span * (1 + rounding));
      CHECK(found.bubble_rate <= timeline.bubble_rate + rounding);
      CHECK(found.longest_span <= best_kind_span(search) * (1 + rounding));
      search.chunks  = SearchChunks::two;
      const auto two = sg::search_schedule(search);
      check_found(two, search);
      CHECK(two.schedule.num_stages() == 2 * p);
      CHECK(two.longest_span <= timeline.longest_span * (1 + rounding));
    }
  }
}
