#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/tensor.hpp"

namespace stepgraph {

// into (+)= the sums of the columns of a [rows, cols] matrix, each from the first row to the last: the gradient of what
// was added to every row.
template <class T>
void column_sums(const T* matrix, std::int64_t rows, std::int64_t cols, Into<T> into) {
  constexpr std::int64_t block = 64;  // at a time, so that the sums stay in registers or close by
  for (std::int64_t first = 0; first < cols; first += block) {
    const std::int64_t count = std::min(block, cols - first);
    T sums[block]            = {};
    for (std::int64_t i = 0; i < rows; ++i) {
      const T* const row = matrix + i * cols + first;
      for (std::int64_t j = 0; j < count; ++j) sums[j] += row[j];
    }
    for (std::int64_t j = 0; j < count; ++j) into.put(first + j, sums[j]);
  }
}

}  // namespace stepgraph
