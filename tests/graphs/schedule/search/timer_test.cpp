#include "graphs/schedule/search/timer.hpp"

#include "graphs/schedule/search/build.hpp"
#include "graphs/schedule/simulation.hpp"
#include "tests/support/schedules/search_tests.hpp"

namespace sg = stepgraph;
using namespace sg::testing::search_tests;

namespace {

Rows random_rows(std::mt19937_64& random, const Setting& setting) {
  sg::search::BuildRules rules{.fill = draw(random, 0, 2) / 2.0, .eager = draw(random, 0, 1) == 0};
  for (int rank = 0; rank < setting.ranks; ++rank) {
    rules.in_flight.push_back(draw(random, 1, 2 * setting.ranks));
    rules.late.push_back(draw(random, 0, 2 * setting.ranks));
  }
  return sg::search::build_rows(setting, rules);
}

void check_times(const Setting& setting, const RowTimer& timer) {
  const auto timeline = sg::simulate(sg::search::schedule_of_rows(setting, timer.rows()),
                                     {.costs = setting.costs, .retain = setting.retain});
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
