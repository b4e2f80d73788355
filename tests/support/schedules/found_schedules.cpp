#include "tests/support/schedules/found_schedules.hpp"

#include <algorithm>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <limits>

#include "engine/base/error.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/validate.hpp"
#include "tests/support/schedules/schedules.hpp"

namespace stepgraph::testing {
namespace {

double most(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

// The kind with so many chunks; no rows: it does not take these numbers.
PipelineSchedule schedule_of_kind(ScheduleKind kind, const ScheduleSpec& spec) {
  try {
    return pipeline_schedule(kind, spec);
  } catch (const Error&) {
    return {};
  }
}

}  // namespace

void check_found(const FoundSchedule& found, const ScheduleSearch& search) {
  CHECK(validate(found.schedule).weights_in_order);
  const ReferenceResult again = reference_result(found.schedule, search.costs, search.retain);
  REQUIRE(again.complete);
  CHECK(found.longest_span == Catch::Approx(again.longest_span).epsilon(rounding));
  CHECK(found.makespan == Catch::Approx(again.makespan).epsilon(rounding));
  CHECK(found.bubble_rate == Catch::Approx(again.bubble_rate).margin(rounding));
  REQUIRE(found.peak_activation.size() == again.peak_activation.size());
  for (std::size_t rank = 0; rank < again.peak_activation.size(); ++rank)
    CHECK(found.peak_activation[rank] == Catch::Approx(again.peak_activation[rank]).epsilon(rounding));
  if (search.limit > 0) CHECK(most(again.peak_activation) <= search.limit * (1 + rounding));
  CHECK(found.lower_bound_rate <= found.bubble_rate);
  CHECK(found.lower_bound_rate >= 0);
}

double best_kind_span(const ScheduleSearch& search) {
  double best         = std::numeric_limits<double>::infinity();
  const bool by_stage = std::ssize(search.costs) == 2 * search.ranks;
  for (const int chunks : {1, 2}) {
    if ((chunks == 1 && (search.chunks == SearchChunks::two || (search.chunks == SearchChunks::any && by_stage))) ||
        (chunks == 2 && search.chunks == SearchChunks::one))
      continue;
    for (const ScheduleKind kind : all_schedule_kinds) {
      const PipelineSchedule schedule = schedule_of_kind(kind, {search.ranks, search.microbatches, chunks});
      if (schedule.rows.empty()) continue;
      const ReferenceResult result = reference_result(schedule, search.costs, search.retain);
      if (search.limit == 0 || most(result.peak_activation) <= search.limit) best = std::min(best, result.longest_span);
    }
  }
  return best;
}

}  // namespace stepgraph::testing
