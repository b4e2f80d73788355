#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

namespace stepgraph {

// The value below which the given share of the values lies: 0 is the smallest, 0.5 the median. At least one value.
[[nodiscard]] inline double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(std::llround(share * static_cast<double>(values.size() - 1)))];
}

}  // namespace stepgraph
