#pragma once
#include <cstdint>
#include <string_view>

#include "ops/tape/tensor.hpp"

// Matrix products, computed in tiles on one core each. Internal to ops/. The bits of a result depend only on its sizes
// and on the layout of its operands, not on the thread that computes a tile or on memory addresses.
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

// c = (base +) a b + bias, rounded once from a sum in the wide type. The epilogue then multiplies c by `times`, and
// `activate` writes y and may change c.
template <class T, class Sum = T>
struct Gemm {
  std::int64_t m = 0, n = 0, k = 0;
  Matrix<T> a           = {};       // [m, k]
  Matrix<T> b           = {};       // [k, n]
  Into<T, Sum> c        = {};       // [m, n]; its base has the same row stride
  std::int64_t c_stride = 0;        // distance between rows, in elements
  const T* bias         = nullptr;  // [n], added to every row; null: 0
  const T* times        = nullptr;  // same layout as c; null: 1
  // Called for `size` consecutive elements in a row of c, as stored. Null: there is no y.
  void (*activate)(Sum* c, Sum* y, std::int64_t size) = nullptr;
  Sum* y                                              = nullptr;  // same layout as c; may be c
};

// c is cut into tiles by its shape alone. The tiles may be computed in any order on any threads, each once. They have
// equal sizes and an even number where possible. Each thread keeps up to 1.7 MiB of scratch for its tiles.
[[nodiscard]] std::int64_t num_gemm_tiles(std::int64_t m, std::int64_t n);

// `own` is portable C++ and always available: each element is a sum over k in blocks of fixed length, in order, and its
// bits depend only on its row, its column and k. `neon` is our kernel for 64-bit Arm, for all types but f64. The same
// holds for it, except that it adds the blocks of k to the base one by one. Where it is not available or does not
// support the type, `own` is used. `fastest` is neon, else the CBLAS found at configure time for the types it supports;
// the CBLAS comes first if it was requested by name.
enum class GemmKernel : std::uint8_t { fastest, neon, own };
[[nodiscard]] std::string_view gemm_library();  // "blis", "openblas", "neon" or "own": the fastest one, for f32

// Whether adjacent tiles can be computed as one larger tile, which packs less: true for our kernels, false for a BLAS.
template <class T>
[[nodiscard]] bool gemm_joins(GemmKernel kernel = GemmKernel::fastest);

// Tiles [first, end).
template <class T, class Sum>
void gemm_tiles(const Gemm<T, Sum>& problem, std::int64_t first, std::int64_t end,
                GemmKernel kernel = GemmKernel::fastest);

// All tiles, on the calling thread.
template <class T, class Sum>
void gemm(const Gemm<T, Sum>& problem, GemmKernel kernel = GemmKernel::fastest) {
  gemm_tiles(problem, 0, num_gemm_tiles(problem.m, problem.n), kernel);
}

extern template void gemm_tiles(const Gemm<float>&, std::int64_t, std::int64_t, GemmKernel);
extern template void gemm_tiles(const Gemm<double>&, std::int64_t, std::int64_t, GemmKernel);
extern template void gemm_tiles(const Gemm<bf16>&, std::int64_t, std::int64_t, GemmKernel);
extern template void gemm_tiles(const Gemm<bf16, float>&, std::int64_t, std::int64_t, GemmKernel);
extern template void gemm_tiles(const Gemm<f16>&, std::int64_t, std::int64_t, GemmKernel);
extern template void gemm_tiles(const Gemm<f16, float>&, std::int64_t, std::int64_t, GemmKernel);

}  // namespace stepgraph
