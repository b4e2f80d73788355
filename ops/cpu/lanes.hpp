#pragma once
#include <cstdint>

// Sums whose order is fixed by their length alone, yet in vectors: element i goes to the partial sum i mod 16.
namespace stepgraph::cpu {

inline constexpr int num_lanes = 16;

template <class Sum>
[[nodiscard]] inline Sum add_lanes(Sum* lanes) {
  for (int half = num_lanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// value(0) + ... + value(size - 1).
template <class Sum, class Value>
[[nodiscard]] inline Sum lane_sum(std::int64_t size, const Value& value) {
  Sum lanes[num_lanes] = {};
  std::int64_t i       = 0;
  for (; i + num_lanes <= size; i += num_lanes) {
    for (int lane = 0; lane < num_lanes; ++lane) lanes[lane] += value(i + lane);
  }
  for (int lane = 0; i < size; ++i, ++lane) lanes[lane] += value(i);
  return add_lanes(lanes);
}

}  // namespace stepgraph::cpu
