#pragma once
#include <cstdint>
#include <string_view>

#include "ops/tape/tensor.hpp"

// Matrix products, tile by tile, on one core each; internal to ops/. The bits of a result depend on its sizes and on
// how its operands lie, and on nothing else: neither on who computes which tile nor on where in memory anything is.
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
template <class T>
[[nodiscard]] Matrix<T> from_row(const Matrix<T>& of, std::int64_t row) {
  return {of.data + row * of.row_stride, of.row_stride, of.col_stride};
}
template <class T>
[[nodiscard]] Matrix<T> from_col(const Matrix<T>& of, std::int64_t col) {
  return {of.data + col * of.col_stride, of.row_stride, of.col_stride};
}

// c = (base +) a b + bias, rounded once from a sum in the wide type. Then c is multiplied with `times`; then activate
// writes y and may change c.
template <class T, class Sum = T>
struct Gemm {
  std::int64_t m = 0, n = 0, k = 0;
  Matrix<T> a           = {};       // [m, k]
  Matrix<T> b           = {};       // [k, n]
  Into<T, Sum> c        = {};       // [m, n]; its base has the same stride
  std::int64_t c_stride = 0;        // from row to row
  const T* bias         = nullptr;  // [n], for every row; none: 0
  const T* times        = nullptr;  // lies as c does; none: 1
  // Of `size` neighbours in a row of c, as it is stored; none: c is all there is.
  void (*activate)(Sum* c, Sum* y, std::int64_t size) = nullptr;
  Sum* y                                              = nullptr;  // lies as c does; may be c
};

// c is cut into tiles by its shape alone; they may be computed in any order, on any thread, each once: equal ones and
// an even number of them where that can be. A thread keeps up to 1.7 MiB for the tiles it computes.
[[nodiscard]] std::int64_t num_gemm_tiles(std::int64_t m, std::int64_t n);

// `own` is written in plain C++ and always there; in it each element is a sum over k in blocks of fixed length, in
// order, whose bits depend on its row, its column and k alone. `neon` is our kernel for 64-bit Arm, for all but f64:
// the same holds for it, except that blocks of k are added to what was there one by one; where it is not there, or does
// not know the type, it is `own`. `fastest` is neon, else the CBLAS that was found at configure time, for types that
// one has; the CBLAS first if it was asked for by name.
enum class GemmKernel : std::uint8_t { fastest, neon, own };
[[nodiscard]] std::string_view gemm_library();  // "blis", "openblas", "neon" or "own": the fastest one, for f32

// Whether neighbours are one larger tile, which packs less: to our kernels, not to a BLAS.
template <class T>
[[nodiscard]] bool gemm_joins(GemmKernel kernel = GemmKernel::fastest);

// Tiles [first, end).
template <class T, class Sum>
void gemm_tiles(const Gemm<T, Sum>& problem, std::int64_t first, std::int64_t end,
                GemmKernel kernel = GemmKernel::fastest);

// All tiles, here.
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
