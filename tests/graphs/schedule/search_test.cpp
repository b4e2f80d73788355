#include "graphs/schedule/search.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/simulation.hpp"
#include "graphs/schedule/validate.hpp"
#include "tests/support/schedules/found_schedules.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::SearchChunks;
using sg::testing::best_kind_span;
using sg::testing::check_found;
using sg::testing::rounding;

TEST_CASE("W of a found schedule are in microbatch order where kinds with other orders are as fast",
          "[graphs][schedule][search]") {
  // Without W, all of round-robin's rivals have the same span: sequential, gpipe and 1f1b. The last holds the least.
  sg::ScheduleSearch search{.ranks = 4, .microbatches = 8, .costs = {{1, 2, 0, 0}}, .budget_s = 0.1, .by_clock = false};
  const auto found = sg::search_schedule(search);
  check_found(found, search);
  CHECK(found.longest_span <= best_kind_span(search) * (1 + rounding));
  CHECK(*std::max_element(found.peak_activation.begin(), found.peak_activation.end()) <= 4);
  search.chunks  = SearchChunks::any;
  const auto any = sg::search_schedule(search);
  CHECK(sg::validate(any.schedule).weights_in_order);
}

TEST_CASE("stages can have costs of their own in a search", "[graphs][schedule][search]") {
  // The last stage has a head. Rank 0 has it in V placement, rank 1 in looped placement.
  const std::vector<sg::Costs> costs{{0.3, 0.3, 0.3, 0.1}, {1, 1, 1, 0.1}, {1, 1, 1, 0.1}, {2, 2, 1.5, 0.1}};
  sg::ScheduleSearch search{.ranks        = 2,
                            .microbatches = 8,
                            .chunks       = SearchChunks::any,
                            .costs        = costs,
                            .limit        = 3,
                            .budget_s     = 0.1,
                            .by_clock     = false};
  const auto found = sg::search_schedule(search);
  check_found(found, search);
  CHECK(found.schedule.rank_of_stage == sg::v_placement(2));
  CHECK(found.longest_span <= best_kind_span(search) * (1 + rounding));
  search         = {.ranks = 4, .microbatches = 8, .costs = costs, .limit = 4, .budget_s = 0.1, .by_clock = false};
  const auto one = sg::search_schedule(search);
  check_found(one, search);
  CHECK(one.longest_span < 0.999 * best_kind_span(search));
}

TEST_CASE("a search gives the same schedule again, and tells its progress", "[graphs][schedule][search]") {
  sg::ScheduleSearch search{.ranks        = 5,
                            .microbatches = 11,
                            .chunks       = SearchChunks::any,
                            .costs        = {{1.1, 0.9, 0.6, 0.2}},
                            .limit        = 4,
                            .budget_s     = 0.2,
                            .by_clock     = false,
                            .seed         = 7};
  const auto first   = sg::search_schedule(search);
  int told           = 0;
  search.on_progress = [&](const sg::SearchProgress& progress) {
    ++told;
    CHECK(progress.bubble_rate >= progress.lower_bound_rate);
    CHECK(progress.bubble_rate <= 1);
    CHECK_FALSE(progress.doing.empty());
  };
  const auto second = sg::search_schedule(search);
  CHECK(told > 0);
  CHECK(first.schedule == second.schedule);
  CHECK(first.bubble_rate == second.bubble_rate);
  CHECK(first.how == second.how);
  CHECK_FALSE(first.out_of_time);
}

TEST_CASE("a search without time still gives a valid schedule, and says so", "[graphs][schedule][search]") {
  const sg::ScheduleSearch search{
      .ranks = 6, .microbatches = 20, .costs = {{1, 1.3, 0.4, 0.3}}, .limit = 3, .budget_s = 1e-9};
  const auto found = sg::search_schedule(search);
  check_found(found, search);
  CHECK(found.out_of_time);
}

TEST_CASE("a search without time begins with a good kind, or with rules where none fits",
          "[graphs][schedule][search]") {
  sg::ScheduleSearch search{.ranks = 24, .microbatches = 48, .costs = {{1, 1.1, 0.7, 0.1}}, .budget_s = 1e-9};
  const auto rate_of = [&](sg::ScheduleKind kind) {
    return sg::simulate(sg::pipeline_schedule(kind, {.ranks = 24, .microbatches = 48}), {.costs = search.costs})
        .bubble_rate;
  };
  const auto free = sg::search_schedule(search);
  check_found(free, search);
  CHECK(free.out_of_time);
  CHECK(free.bubble_rate <= rate_of(sg::ScheduleKind::zb_h1) * (1 + rounding));
  search.limit     = 22;  // 1f1b and zb-h1 hold 24
  const auto tight = sg::search_schedule(search);
  check_found(tight, search);
  CHECK(tight.bubble_rate < 0.6 * rate_of(sg::ScheduleKind::round_robin));
  CHECK(tight.how == "rules");
}

TEST_CASE("searches with impossible numbers are refused", "[graphs][schedule][search][refuses]") {
  const auto refused = [](const sg::ScheduleSearch& search, const std::string& why) {
    CHECK_THROWS_MATCHES(sg::search_schedule(search), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  refused({.ranks = 0, .microbatches = 1}, "auto: 0 pipeline ranks (1 to 1024)");
  refused({.ranks = 2, .microbatches = 0}, "auto: 0 microbatches (1 to 65535)");
  refused({.ranks = 1024, .microbatches = 65535}, "(at most 2^21)");
  refused({.ranks = 2, .microbatches = 2, .limit = 0.5}, "auto: a limit of 0.5 (at least 1");
  refused({.ranks = 2, .microbatches = 2, .limit = -1}, "auto: a limit of -1 (at least 1");
  refused({.ranks = 2, .microbatches = 2, .retain = 1.5}, "auto: retain 1.5 (0 to 1)");
  refused({.ranks = 2, .microbatches = 2, .budget_s = 0}, "auto: a budget of 0 s (above 0)");
  refused({.ranks = 3, .microbatches = 2, .costs = {{}, {}}}, "2 costs for 3 ranks");
}
