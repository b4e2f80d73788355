#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/cpu/into.hpp"
#include "ops/tensor.hpp"

namespace stepgraph {

// into (+)= the sums of columns [begin, end) of a [rows, cols] matrix, each from the first row to the last: the
// gradient of what was added to every row.
template <class T, class Sum>
void column_sums(const T* matrix, std::int64_t rows, std::int64_t cols, Into<T, Sum> into, std::int64_t begin,
                 std::int64_t end) {
  constexpr std::int64_t block = 64;  // at a time, so that the sums stay in registers or close by
  for (std::int64_t first = begin; first < end; first += block) {
    const std::int64_t count = std::min(block, end - first);
    Wide<T> sums[block]      = {};
    for (std::int64_t i = 0; i < rows; ++i) {
      const T* const row = matrix + i * cols + first;
      if (count == block) {
        for (std::int64_t j = 0; j < block; ++j) sums[j] += wide(row[j]);
      } else {
        for (std::int64_t j = 0; j < count; ++j) sums[j] += wide(row[j]);
      }
    }
    for (std::int64_t j = 0; j < count; ++j) into.put(first + j, sums[j]);
  }
}

template <class T, class Sum>
void column_sums(const T* matrix, std::int64_t rows, std::int64_t cols, Into<T, Sum> into) {
  column_sums(matrix, rows, cols, into, 0, cols);
}

// The same bits, side by side where there is much to sum: `column_sums_side_by_side` says whether the node is to be
// declared parallel.
[[nodiscard]] inline bool column_sums_side_by_side(std::int64_t rows, std::int64_t cols) {
  return cols > 128 && rows * cols > cpu::elements_per_tile;
}
template <class T, class Sum>
void column_sums(const Context& context, const T* matrix, std::int64_t rows, std::int64_t cols, Into<T, Sum> into) {
  const std::int64_t tile = column_sums_side_by_side(rows, cols) ? 128 : cols;
  cpu::for_tiles(context, cols, tile,
                 [&](std::int64_t begin, std::int64_t end) { column_sums(matrix, rows, cols, into, begin, end); });
}

}  // namespace stepgraph
