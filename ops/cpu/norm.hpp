#pragma once
#include <cstdint>

#include "ops/tape/tensor.hpp"

// Layer norm and RMS norm over rows of `width` elements, on the CPU: (row - center) * scale. Sums have a fixed order;
// their last steps are in f64.
namespace stepgraph::cpu {

// x and y: [rows, width]. weight and bias have the same type or the wide type. scale: 1 / deviation or 1 / root mean
// square of each row. For an RMS norm, center and bias are null.
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

// Columns [begin, end), at most columns_per_tile, of the weight gradients: for the weight, the sum over rows of dy
// times the normalised x; for the bias, if present, the sum of dy. Rows are added in order.
template <class T, class Param>
void norm_weight_gradient(const NormBackward<T, Param>& norm, const Into<T, Wide<T>>& dw, const Into<T, Wide<T>>* db,
                          std::int64_t rows, std::int64_t begin, std::int64_t end);

}  // namespace stepgraph::cpu
