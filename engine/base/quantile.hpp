#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

namespace stepgraph {

// The value below which that share of them lies: 0 is the smallest, 0.5 the median. There is at least one.
[[nodiscard]] inline double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(std::llround(share * static_cast<double>(values.size() - 1)))];
}

}  // namespace stepgraph
