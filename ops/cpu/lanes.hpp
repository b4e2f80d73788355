#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/cpu/level.hpp"

// Vectorisable sums whose order depends only on their length: element i is added to partial sum i mod 16.
namespace stepgraph::cpu {
inline namespace STEPGRAPH_LEVEL {

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

// The same for values of type Part. Lanes are summed in Part over blocks of 256 elements, which is 16 additions per
// lane, and the blocks in f64. For results that are rounded to float this is as accurate as f64 throughout, and avoids
// converting each element.
inline constexpr std::int64_t elements_per_block = 16 * num_lanes;
template <class Part, class Value>
[[nodiscard]] inline double block_sum(std::int64_t size, const Value& value) {
  double lanes[num_lanes] = {};
  for (std::int64_t begin = 0; begin < size; begin += elements_per_block) {
    const std::int64_t end = std::min(size, begin + elements_per_block);
    Part part[num_lanes]   = {};
    std::int64_t i         = begin;
    for (; i + num_lanes <= end; i += num_lanes) {
      for (int lane = 0; lane < num_lanes; ++lane) part[lane] += value(i + lane);
    }
    for (int lane = 0; i < end; ++i, ++lane) part[lane] += value(i);
    for (int lane = 0; lane < num_lanes; ++lane) lanes[lane] += static_cast<double>(part[lane]);
  }
  return add_lanes(lanes);
}

// Two such sums over the same elements: value(i) has a `first` and a `second`.
struct TwoSums {
  double first, second;
};
template <class Part>
struct TwoParts {
  Part first, second;
};
template <class Part, class Value>
[[nodiscard]] inline TwoSums block_sums(std::int64_t size, const Value& value) {
  double first[num_lanes] = {}, second[num_lanes] = {};
  for (std::int64_t begin = 0; begin < size; begin += elements_per_block) {
    const std::int64_t end = std::min(size, begin + elements_per_block);
    Part a[num_lanes] = {}, b[num_lanes] = {};
    std::int64_t i = begin;
    for (; i + num_lanes <= end; i += num_lanes) {
#pragma GCC unroll 1  // GCC vectorises the loop over lanes only if it is still a loop
      for (int lane = 0; lane < num_lanes; ++lane) {
        const TwoParts<Part> part = value(i + lane);
        a[lane] += part.first;
        b[lane] += part.second;
      }
    }
    for (int lane = 0; i < end; ++i, ++lane) {
      const TwoParts<Part> part = value(i);
      a[lane] += part.first;
      b[lane] += part.second;
    }
    for (int lane = 0; lane < num_lanes; ++lane) {
      first[lane] += static_cast<double>(a[lane]);
      second[lane] += static_cast<double>(b[lane]);
    }
  }
  return {add_lanes(first), add_lanes(second)};
}

// Columns of a matrix that are summed at a time, in all kernels.
inline constexpr std::int64_t columns_per_tile = 128;

// Sums of columns from the first row to the last: `part` sums 4 rows at a time and is added to `sums`, in f64, after
// every 32 rows.
template <class Part>
struct ColumnParts {
  double sums[columns_per_tile] = {};
  Part part[columns_per_tile]   = {};

  // row_of(row) returns the values of a row as a function of the column.
  template <class RowOf>
  void add_rows(std::int64_t rows, std::int64_t columns, const RowOf& row_of) {
    std::int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
      add_four(columns, row_of(row), row_of(row + 1), row_of(row + 2), row_of(row + 3));
      if (row % 32 == 28) flush(columns);
    }
    for (; row < rows; ++row) {
      const auto value = row_of(row);
      for (std::int64_t c = 0; c < columns; ++c) part[c] += value(c);
    }
    flush(columns);
  }

 private:
  template <class Value>
  void add_four(std::int64_t columns, const Value& a, const Value& b, const Value& c, const Value& d) {
    Part* __restrict to = part;
    for (std::int64_t i = 0; i < columns; ++i) to[i] += (a(i) + b(i)) + (c(i) + d(i));
  }
  void flush(std::int64_t columns) {
    for (std::int64_t c = 0; c < columns; ++c) sums[c] += static_cast<double>(part[c]);
    for (std::int64_t c = 0; c < columns; ++c) part[c] = 0;
  }
};

}  // namespace STEPGRAPH_LEVEL
}  // namespace stepgraph::cpu
