#pragma once
#include <functional>
#include <vector>

#include "graphs/schedule/search/rows.hpp"

namespace stepgraph::search {

// A lower bound of the longest span of any schedule of this setting within its limit. bound.cpp has the proof.
struct SpanBound {
  double span = 0;
  // What each rank needs for a span of this length: at least so many F before its first I, and at least so many W after
  // its last I. A good start for a search.
  std::vector<int> first_forwards = {}, last_weights = {};
};
// `stop` is asked now and then. If it says so, the bound is lower than it could be.
[[nodiscard]] SpanBound span_bound(
    const Setting& setting, const std::function<bool()>& stop = [] { return false; });

// The numbers for any span. False: no schedule has a span that short.
bool needs_of_span(const Setting& setting, double span, SpanBound& needs);

}  // namespace stepgraph::search
