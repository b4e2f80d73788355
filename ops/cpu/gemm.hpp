#pragma once
#include <cstdint>

#include "ops/tensor.hpp"

// Matrix products on one core's vector units; internal to ops/. Each element of the result is a sum over k in blocks of
// fixed length, in order, and the blocks in order: its bits depend on its own row and column and on nothing else,
// neither on the other sizes nor on who computes which tile.
namespace stepgraph {

// Element (i, j) is data[i * row_stride + j * col_stride]: transposed by exchanging strides.
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

// c = (base +) a b + bias.
template <class T>
struct Gemm {
  std::int64_t m = 0, n = 0, k = 0;
  Matrix<T> a           = {};       // [m, k]
  Matrix<T> b           = {};       // [k, n]
  Into<T> c             = {};       // [m, n]; its base has the same stride
  std::int64_t c_stride = 0;        // from row to row
  const T* bias         = nullptr;  // [n], for every row; none: 0
};

// c is cut into tiles by its shape alone; they may be computed in any order, on any thread, each once. A tile takes a
// quarter of a MiB of stack.
[[nodiscard]] std::int64_t num_gemm_tiles(std::int64_t m, std::int64_t n);
template <class T>
void gemm_tile(const Gemm<T>& problem, std::int64_t tile);

// All tiles, here.
template <class T>
void gemm(const Gemm<T>& problem) {
  for (std::int64_t tile = 0; tile < num_gemm_tiles(problem.m, problem.n); ++tile) gemm_tile(problem, tile);
}

extern template void gemm_tile<float>(const Gemm<float>&, std::int64_t);
extern template void gemm_tile<double>(const Gemm<double>&, std::int64_t);

}  // namespace stepgraph
