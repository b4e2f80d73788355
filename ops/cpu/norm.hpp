#pragma once
#include <cstdint>

#include "ops/tape/tensor.hpp"

// Layer norm and RMS norm over rows of `width` elements, on the CPU: each row less its center, times its scale. Sums
// are in a fixed order, their last steps in f64.
namespace stepgraph::cpu {

// x and y: [rows, width]; weight and bias are of their type, or wide; scale: 1 / deviation or 1 / root mean square of
// each row. An RMS norm has no center and no bias: they are null.
template <class T, class Param = T>
struct Norm {
  std::int64_t width;
  const T* x;
  const Param* weight;
  const Param* bias;
  Wide<T>* center;
  Wide<T>* scale;
  T* y;
  double eps;
};
template <class T, class Param>
void norm_forward(const Norm<T, Param>& norm, std::int64_t begin_row, std::int64_t end_row);

template <class T, class Param = T>
struct NormBackward {
  std::int64_t width;
  const T* x;
  const Param* weight;
  const Wide<T>* center;  // null: RMS norm
  const Wide<T>* scale;
  const T* dy;
};
template <class T, class Param>
void norm_backward(const NormBackward<T, Param>& norm, const Into<T>& dx, std::int64_t begin_row, std::int64_t end_row);

// Columns [begin, end) of gradients of weights: of the norm's, the sum over rows of dy times the normed x, and, where
// there is a bias, of dy alone. Rows are added in
// their order; at most columns_per_tile columns.
template <class T, class Param>
void norm_weight_gradient(const NormBackward<T, Param>& norm, const Into<T, Wide<T>>& dw, const Into<T, Wide<T>>* db,
                          std::int64_t rows, std::int64_t begin, std::int64_t end);

}  // namespace stepgraph::cpu
