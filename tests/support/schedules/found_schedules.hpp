#pragma once
#include "graphs/schedule/search.hpp"

namespace stepgraph::testing {

// Checks what holds for every result of a search: it is valid, has W in microbatch order, runs without a deadlock,
// stays within the limit, and its rate, spans and peaks are those of reference_result.
void check_found(const FoundSchedule& found, const ScheduleSearch& search);

// The shortest span of all fixed kinds that fit the search's limit and have one of the placements that it searches, as
// reference_result times them. Infinity: none fits.
[[nodiscard]] double best_kind_span(const ScheduleSearch& search);

// Spans of two orders of the same actions are sums in another order, so they can differ by rounding.
inline constexpr double rounding = 1e-12;

}  // namespace stepgraph::testing
