#pragma once
#include <cstddef>
#include <vector>

#include "backends/cuda/activity.hpp"

namespace stepgraph::bench {

// How much of the time from the first begin to the last end something ran. Moments count once, however much runs.
struct Idle {
  std::size_t num_intervals = 0;
  double span_s             = 0;
  double busy_s             = 0;
  double longest_gap_s      = 0;  // in which nothing ran
  [[nodiscard]] double share() const noexcept { return span_s > 0 ? 1 - busy_s / span_s : 0; }
};
[[nodiscard]] Idle idle_of(std::vector<CudaInterval> intervals);

}  // namespace stepgraph::bench
