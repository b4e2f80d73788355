#include "graphs/schedule/search_rows.hpp"

#include <algorithm>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <random>

#include "engine/base/error.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/search_bound.hpp"
#include "graphs/schedule/search_build.hpp"
#include "graphs/schedule/search_join.hpp"
#include "graphs/schedule/simulation.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Approx;
using sg::search::Rows;
using sg::search::RowTimer;
using sg::search::Setting;

namespace {

int draw(std::mt19937_64& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

// Multiples of a quarter, so that sums are exact in any order.
Setting random_setting(std::mt19937_64& random, int max_ranks, int max_microbatches, int max_chunks) {
  Setting setting{.ranks        = draw(random, 1, max_ranks),
                  .chunks       = draw(random, 1, max_chunks),
                  .microbatches = draw(random, 1, max_microbatches),
                  .retain       = draw(random, 0, 4) / 4.0};
  setting.rank_of_stage = setting.chunks == 2 && draw(random, 0, 1) == 0
                              ? sg::v_placement(setting.ranks)
                              : sg::looped_placement(setting.ranks, setting.chunks);
  for (int stage = 0; stage < setting.num_stages(); ++stage) {
    setting.costs.push_back({draw(random, 1, 12) / 4.0, draw(random, 1, 12) / 4.0, draw(random, 0, 12) / 4.0,
                             std::max(0, draw(random, -3, 6)) / 4.0});
  }
  if (draw(random, 0, 1) == 0) setting.limit = 1 + draw(random, 0, 4 * setting.ranks) / 2.0;
  return setting;
}

Rows random_rows(std::mt19937_64& random, const Setting& setting) {
  sg::search::BuildRules rules{.fill = draw(random, 0, 2) / 2.0, .eager = draw(random, 0, 1) == 0};
  for (int rank = 0; rank < setting.ranks; ++rank) {
    rules.in_flight.push_back(draw(random, 1, 2 * setting.ranks));
    rules.late.push_back(draw(random, 0, 2 * setting.ranks));
  }
  return sg::search::build_rows(setting, rules);
}

sg::ScheduleTimeline simulated(const Setting& setting, const sg::PipelineSchedule& schedule) {
  // One cost for each stage; those of a single rank with one stage are that rank's.
  return sg::simulate(schedule, {.costs = setting.costs, .retain = setting.retain});
}

void check_times(const Setting& setting, const RowTimer& timer) {
  const auto timeline = simulated(setting, sg::search::schedule_of_rows(setting, timer.rows()));
  CHECK(timer.longest_span() == timeline.longest_span);
  CHECK(timer.makespan() == timeline.makespan);
  bool equal = true;
  for (int rank = 0; rank < setting.ranks; ++rank) {
    for (int i = 0; i < timer.rows().length; ++i) {
      const sg::NodeTime time = timeline.rows[static_cast<std::size_t>(rank)][static_cast<std::size_t>(i)];
      equal &= timer.begin(rank, i) == time.begin_s && timer.end(rank, i) == time.end_s;
    }
  }
  CHECK(equal);
}

// All orders of F, I and W of one rank, in which the microbatches of a stage run in order.
void all_rows(const Setting& setting, std::array<int, 6> count, std::vector<sg::search::Letter>& now,
              std::vector<std::vector<sg::search::Letter>>& out) {
  if (std::ssize(now) == setting.row_length()) return out.push_back(now);
  for (std::size_t letter = 0; letter < 3 * static_cast<std::size_t>(setting.chunks); ++letter) {
    if (count[letter] == setting.microbatches || (letter % 3 > 0 && count[letter] == count[letter - 1])) continue;
    ++count[letter];
    now.push_back(static_cast<sg::search::Letter>(letter));
    all_rows(setting, count, now, out);
    now.pop_back();
    --count[letter];
  }
}

// The least span of all schedules, by trying each.
double least_span(const Setting& setting) {
  std::vector<std::vector<sg::search::Letter>> of_rank;
  std::vector<sg::search::Letter> none;
  all_rows(setting, {}, none, of_rank);
  RowTimer timer(setting);
  double least = sg::search::never;
  std::vector<std::size_t> choice(static_cast<std::size_t>(setting.ranks), 0);
  for (bool more = true; more;) {
    Rows rows{.length = setting.row_length()};
    for (const std::size_t i : choice) rows.letters.insert(rows.letters.end(), of_rank[i].begin(), of_rank[i].end());
    if (fits(setting, rows) && timer.set(rows)) least = std::min(least, timer.longest_span());
    more = false;
    for (std::size_t& i : choice) {
      if (++i < of_rank.size()) {
        more = true;
        break;
      }
      i = 0;
    }
  }
  return least;
}

}  // namespace

TEST_CASE("rows are timed as the engine's simulator times their schedule, also after each move",
          "[graphs][schedule][search]") {
  std::mt19937_64 random(24);
  int moved = 0;
  for (int i = 0; i < sg::testing::cases(60); ++i) {
    CAPTURE(i);
    const Setting setting = random_setting(random, 6, 8, 2);
    RowTimer timer(setting);
    const Rows rows = random_rows(random, setting);
    REQUIRE(rows.length == setting.row_length());
    CHECK(fits(setting, rows));
    REQUIRE(timer.set(rows));
    check_times(setting, timer);
    for (int move = 0; move < 20; ++move) {
      const int rank = draw(random, 0, setting.ranks - 1);
      const int from = draw(random, 0, rows.length - 1), to = draw(random, 0, rows.length - 1);
      const double before = timer.longest_span();
      const Rows old      = timer.rows();
      const bool bounded  = move % 3 == 0;
      const double span   = timer.move(rank, from, to, bounded ? before : sg::search::never);
      if (span != sg::search::never) {
        CHECK(span == timer.longest_span());
        if (bounded) CHECK(span <= before);
        CHECK(fits(setting, timer.rows()));
        if (move % 2 == 0) {
          timer.keep();
          ++moved;
        } else {
          timer.undo();
        }
      }
      if (span == sg::search::never || move % 2 == 1) {
        CHECK(timer.rows().letters == old.letters);
        CHECK(timer.longest_span() == before);
      }
      check_times(setting, timer);
    }
    const Rows other = random_rows(random, setting);
    if (timer.replace(other, sg::search::never) != sg::search::never) {
      timer.keep();
      CHECK(timer.rows().letters == other.letters);
      check_times(setting, timer);
    }
  }
  CHECK(moved >= sg::testing::at_least(100));
}

TEST_CASE("rows of fixed kinds are no longer than the kinds, and hold no more", "[graphs][schedule][search]") {
  std::mt19937_64 random(25);
  for (const sg::ScheduleKind kind : sg::all_schedule_kinds) {
    for (int i = 0; i < sg::testing::cases(8); ++i) {
      CAPTURE(kind, i);
      const int ranks = draw(random, 1, 6), chunks = kind <= sg::ScheduleKind::gpipe ? draw(random, 1, 2) : 0;
      const auto schedule =
          sg::pipeline_schedule(kind, {.ranks = ranks, .microbatches = draw(random, 1, 12), .chunks = chunks});
      Setting setting       = random_setting(random, 1, 1, 1);
      setting.ranks         = ranks;
      setting.chunks        = schedule.num_stages() / ranks;
      setting.microbatches  = schedule.num_microbatches;
      setting.rank_of_stage = schedule.rank_of_stage;
      setting.limit         = sg::search::never;
      setting.costs         = std::vector(schedule.rank_of_stage.size(), setting.costs.front());
      const auto rows       = rows_of(setting, schedule);
      const auto split      = sg::search::schedule_of_rows(setting, rows);
      const auto of_kind = simulated(setting, schedule), of_rows = simulated(setting, split);
      CHECK(of_rows.longest_span <= of_kind.longest_span);
      for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank)
        CHECK(of_rows.peak_activation[rank] <= of_kind.peak_activation[rank]);
      // I and W are joined where that costs nothing.
      const auto joined = sg::search::schedule_of_rows(setting, rows, sg::search::joinable(setting, rows));
      CHECK(simulated(setting, joined).longest_span == of_rows.longest_span);
      CHECK(simulated(setting, joined).makespan <= of_rows.makespan * (1 + 1e-9));
      CHECK(joined.num_actions() <= split.num_actions());
      if (kind == sg::ScheduleKind::gpipe && ranks == 1) CHECK(joined.num_actions() < split.num_actions());
    }
  }
}

TEST_CASE("the bound of spans is below every schedule of small pipelines, and often reached",
          "[graphs][schedule][search]") {
  std::mt19937_64 random(26);
  int reached     = 0;
  const int count = sg::testing::cases(150);
  for (int i = 0; i < count; ++i) {
    Setting setting = random_setting(random, 3, 2, 2);
    if (setting.chunks == 2) {  // 20 orders of a rank with one microbatch, 23,100 with two
      setting.microbatches = setting.ranks == 1 && i % 8 == 0 ? 2 : 1;
    } else if (setting.ranks < 3) {
      setting.microbatches = draw(random, 1, 3);
    }
    if (draw(random, 0, 2) > 0) {
      for (sg::Costs& cost : setting.costs) cost = setting.costs.front();
    }
    CAPTURE(i, setting.ranks, setting.chunks, setting.microbatches, setting.limit, setting.retain);
    const double bound = sg::search::span_bound(setting).span, least = least_span(setting);
    CHECK(bound <= least * (1 + 1e-9));
    reached += bound >= least * (1 - 1e-9);
    sg::search::SpanBound needs;
    CHECK(sg::search::needs_of_span(setting, least * (1 + 1e-9), needs));
  }
  CHECK(reached >= count / 3);
}
