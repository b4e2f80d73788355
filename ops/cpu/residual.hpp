#pragma once
#include <cstdint>
#include <optional>

#include "ops/shared/dropout_mask.hpp"
#include "ops/tape/tensor.hpp"

// Elementwise operations on the residual stream, on the CPU.
namespace stepgraph::cpu {

// The dropout of a matrix: element (row, column) has mask index first + row * width + column.
struct Drop {
  DropoutMask mask;
  std::int64_t first;
};

// y = x + drop(branch + bias), over rows of `width` elements.
template <class T>
struct ResidualRows {
  std::int64_t width;
  const T* x;
  const T* branch;
  const T* bias;  // null: none
  T* y;
  std::optional<Drop> drop;
};
template <class T>
void residual_forward(const ResidualRows<T>& rows, std::int64_t begin_row, std::int64_t end_row);

// Elements [begin, end) of into (+)= drop(from).
template <class T>
void put_dropped(const Drop& drop, const T* from, const Into<T>& into, std::int64_t begin, std::int64_t end);

// Columns [begin, end), at most columns_per_tile, of the gradient of a bias that was added to each row of a branch: the
// sum of drop(dy) over the rows, in order.
template <class T>
void column_sum(const T* dy, std::int64_t width, const std::optional<Drop>& drop, const Into<T, Wide<T>>& into,
                std::int64_t rows, std::int64_t begin, std::int64_t end);

}  // namespace stepgraph::cpu
