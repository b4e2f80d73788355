#pragma once
#include <cstddef>
#include <vector>

#include "backends/cuda/activity.hpp"

namespace stepgraph::bench {

// The busy time of a device from the first begin to the last end. Overlapping intervals count once.
struct Idle {
  std::size_t num_intervals = 0;
  double span_s             = 0;
  double busy_s             = 0;
  double longest_gap_s      = 0;  // the longest time without activity
  [[nodiscard]] double share() const noexcept { return span_s > 0 ? 1 - busy_s / span_s : 0; }
};
[[nodiscard]] Idle idle_of(std::vector<CudaInterval> intervals);

}  // namespace stepgraph::bench
