#include "graphs/schedule/search/rows.hpp"

#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/search/join.hpp"
#include "graphs/schedule/simulation.hpp"
#include "tests/support/schedules/search_tests.hpp"

namespace sg = stepgraph;
using namespace sg::testing::search_tests;

namespace {

sg::ScheduleTimeline simulated(const Setting& setting, const sg::PipelineSchedule& schedule) {
  // One cost for each stage; those of a single rank with one stage are that rank's.
  return sg::simulate(schedule, {.costs = setting.costs, .retain = setting.retain});
}

}  // namespace

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
