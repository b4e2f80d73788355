#pragma once
#include <cstdint>

namespace stepgraph {

// Element (i, j) is data[i * row_stride + j * col_stride]. Swap the strides to transpose.
template <class T>
struct Matrix {
  const T* data           = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
};
template <class T>
[[nodiscard]] Matrix<T> transposed(const Matrix<T>& of) {
  return {of.data, of.col_stride, of.row_stride};
}
template <class T>
[[nodiscard]] Matrix<T> from_row(const Matrix<T>& of, std::int64_t row) {
  return {of.data + row * of.row_stride, of.row_stride, of.col_stride};
}
template <class T>
[[nodiscard]] Matrix<T> from_col(const Matrix<T>& of, std::int64_t col) {
  return {of.data + col * of.col_stride, of.row_stride, of.col_stride};
}

// c = ((base +) a b (+ bias)) (times): what our kernels for one kind of processor compute. Bias and times have the type
// Side.
template <class T, class Out = float, class Side = float>
struct PanelProduct {
  std::int64_t m = 0, n = 0, k = 0;  // k is not 0
  Matrix<T> a           = {};        // [m, k]
  Matrix<T> b           = {};        // [k, n]
  Out* c                = nullptr;
  const Out* base       = nullptr;  // same layout as c; may be c
  std::int64_t c_stride = 0;
  const Side* bias      = nullptr;  // [n]
  const Side* times     = nullptr;  // same layout as c
};

// The output of a register block: out = ((base +) sums (+ bias)) (times). Null: not added, not multiplied.
struct PanelOut {
  float* out;
  const float* base;
  std::int64_t stride;
  const float* bias;
  const float* times;
};

// Called for finished parts of c while they are in cache. Null: nothing is called.
struct PartDone {
  void (*call)(const void* of, std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols) = nullptr;
  const void* of                                                                                         = nullptr;
};

}  // namespace stepgraph
