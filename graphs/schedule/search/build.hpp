#pragma once
#include <functional>
#include <vector>

#include "graphs/schedule/search/rows.hpp"

namespace stepgraph::search {

// How build_rows decides. Counts are of stages: with two chunks a rank's microbatch counts twice.
struct BuildRules {
  std::vector<int> in_flight = {};     // [rank]: F done and I not yet: F comes first below that, I from there on
  std::vector<int> late      = {};     // [rank]: so many W may wait; one more, and W comes first
  double fill                = 0;      // W fills a gap that is at least this share of its time
  double tail_fill           = 0;      // the same when all F are done
  double patience            = 0;      // how long the preferred one of F and I is waited for if the other is ready
  bool eager                 = false;  // F fills a gap, if the limit allows it
  bool deep                  = true;   // of two F that are ready, that of the later stage
};

// Rows made along the time, by rules: each rank takes the best action that is ready when it is free. They fit the
// limit, if it is at least 1, and can run. `stop` is asked now and then; no rows if it says so.
[[nodiscard]] Rows build_rows(
    const Setting& setting, const BuildRules& rules, const std::function<bool()>& stop = [] { return false; });

// Rows of one chunk by counts alone, as zb_h2 has them: `in_flight` times F, then I, W if more than `late` wait, F.
[[nodiscard]] Rows build_regular_rows(const Setting& setting, const std::vector<int>& in_flight,
                                      const std::vector<int>& late);

}  // namespace stepgraph::search
