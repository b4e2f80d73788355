#pragma once
#include <cstdint>

#include "ops/tensor.hpp"

// Layer norm and RMS norm over rows of `width` elements, on the CPU: each row less its center, times its scale. Sums
// are in f64 in a fixed order.
namespace stepgraph::cpu {

// x and y: [rows, width]; scale: 1 / deviation or 1 / root mean square of each row. An RMS norm has no center and no
// bias: they are null.
template <class T>
struct Norm {
  std::int64_t width;
  const T* x;
  const T* weight;
  const T* bias;
  T* center;
  T* scale;
  T* y;
  double eps;
};
template <class T>
void norm_forward(const Norm<T>& norm, std::int64_t begin_row, std::int64_t end_row);

template <class T>
struct NormBackward {
  std::int64_t width;
  const T* x;
  const T* weight;
  const T* center;  // null: RMS norm
  const T* scale;
  const T* dy;
};
template <class T>
void norm_backward(const NormBackward<T>& norm, const Into<T>& dx, std::int64_t begin_row, std::int64_t end_row);

// Columns [begin, end) of the weight's gradient: the sum over rows of dy times the normed x; of the bias's: of dy
// alone. Rows are added in their order.
template <class T>
void norm_weight_gradient(const NormBackward<T>& norm, const Into<T>& dw, std::int64_t rows, std::int64_t begin,
                          std::int64_t end);
template <class T>
void column_sum(const T* dy, std::int64_t width, const Into<T>& db, std::int64_t rows, std::int64_t begin,
                std::int64_t end);

// How many columns are summed at a time: [begin, end) has at most so many.
inline constexpr std::int64_t columns_per_tile = 64;

}  // namespace stepgraph::cpu
