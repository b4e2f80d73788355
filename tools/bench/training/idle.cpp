#include "tools/bench/training/idle.hpp"

#include <algorithm>

namespace stepgraph::bench {

Idle idle_of(std::vector<CudaInterval> intervals) {
  Idle idle{.num_intervals = intervals.size()};
  if (intervals.empty()) return idle;
  std::sort(intervals.begin(), intervals.end(),
            [](const CudaInterval& a, const CudaInterval& b) { return a.begin_ns < b.begin_ns; });
  const std::int64_t begin = intervals.front().begin_ns;
  std::int64_t until = begin, busy = 0, longest = 0;
  for (const CudaInterval& each : intervals) {
    longest = std::max(longest, each.begin_ns - until);
    busy += std::max<std::int64_t>(0, each.end_ns - std::max(until, each.begin_ns));
    until = std::max(until, each.end_ns);
  }
  idle.span_s        = 1e-9 * static_cast<double>(until - begin);
  idle.busy_s        = 1e-9 * static_cast<double>(busy);
  idle.longest_gap_s = 1e-9 * static_cast<double>(longest);
  return idle;
}

}  // namespace stepgraph::bench
