#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>

#include "ops/cpu/gemm/gemm.hpp"
#include "ops/cpu/vector.hpp"

// The portable product: blocks whose operands are packed and widened into caches, and whose sums stay in registers.
namespace stepgraph::cpu {

// One packed block of each operand, and its sums. T is a wide type.
template <class T>
struct GemmBlock {
  typedef T Vector __attribute__((vector_size(vector_bytes), may_alias));
  // The sums of a register block stay in vector registers: 18 of 32 there, 12 of 16 elsewhere; the rest hold operands.
  // Neither this nor the vector width affects an element's bits: each element is one sum over k, in order.
#if defined(__aarch64__) || defined(__AVX512F__)
  static constexpr std::int64_t block_rows = 6, block_vectors = 3;
#else
  static constexpr std::int64_t block_rows = 6, block_vectors = 2;
#endif
  static constexpr std::int64_t max_rows = 96, max_cols = 96;  // multiples of the register block, for both types
  static constexpr std::int64_t lanes      = lanes_of<T>;
  static constexpr std::int64_t block_cols = block_vectors * lanes;
  static constexpr std::int64_t depth      = 1024 / sizeof(T);  // of a block of k; affects the bits of the sums
  static_assert(max_rows % block_rows == 0 && max_cols % block_cols == 0);

  // Packed so that the innermost loop reads contiguously: for each block of rows (columns), k by k.
  alignas(64) T a[max_rows * depth];
  alignas(64) T b[max_cols * depth];
  alignas(64) T sum[max_rows * max_cols];
};

// Packs lanes [0, used) of `width` for each of `depth` steps along the other dim. The remaining lanes are zero and go
// through the same arithmetic. `across` and `along` are strides.
template <std::int64_t width, class T>
void pack_block(const T* from, std::int64_t across, std::int64_t along, std::int64_t used, std::int64_t depth,
                Wide<T>* to) {
  if (used == width && across == 1) {
    for (std::int64_t p = 0; p < depth; ++p) {
      for (std::int64_t i = 0; i < width; ++i) to[p * width + i] = wide(from[p * along + i]);
    }
    return;
  }
  for (std::int64_t i = 0; i < width; ++i) {
    for (std::int64_t p = 0; p < depth; ++p)
      to[p * width + i] = i < used ? wide(from[i * across + p * along]) : Wide<T>{0};
  }
}

template <std::int64_t width, class T>
void pack(const T* from, std::int64_t across, std::int64_t along, std::int64_t used, std::int64_t depth, Wide<T>* to) {
  for (std::int64_t i = 0; i < used; i += width)
    pack_block<width>(from + i * across, across, along, std::min(width, used - i), depth, to + i * depth);
}

// sum (+)= a b for one register block over one block of k.
template <class T>
void multiply_block(const T* a, const T* b, std::int64_t depth, bool first, T* sum) {
  using Vector                      = typename GemmBlock<T>::Vector;
  constexpr std::int64_t block_rows = GemmBlock<T>::block_rows, block_vectors = GemmBlock<T>::block_vectors;
  Vector acc[block_rows][block_vectors];
#pragma GCC unroll 6
  for (std::int64_t i = 0; i < block_rows; ++i) {
#pragma GCC unroll 3
    for (std::int64_t j = 0; j < block_vectors; ++j) acc[i][j] = Vector{};
  }
  for (std::int64_t p = 0; p < depth; ++p) {
    const auto* const right = reinterpret_cast<const Vector*>(b + p * GemmBlock<T>::block_cols);
#pragma GCC unroll 6
    for (std::int64_t i = 0; i < block_rows; ++i) {
      const T left = a[p * block_rows + i];
#pragma GCC unroll 3
      for (std::int64_t j = 0; j < block_vectors; ++j) acc[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 6
  for (std::int64_t i = 0; i < block_rows; ++i) {
    auto* const row = reinterpret_cast<Vector*>(sum + i * GemmBlock<T>::max_cols);
#pragma GCC unroll 3
    for (std::int64_t j = 0; j < block_vectors; ++j) row[j] = first ? acc[i][j] : row[j] + acc[i][j];
  }
}

// t.sum = a b, of at most max_rows by max_cols.
template <class T>
void multiply_packed(GemmBlock<Wide<T>>& t, const Matrix<T>& a, const Matrix<T>& b, std::int64_t rows,
                     std::int64_t cols, std::int64_t k) {
  using Block                       = GemmBlock<Wide<T>>;
  constexpr std::int64_t block_rows = Block::block_rows, block_cols = Block::block_cols;
  if (k == 0) std::fill(std::begin(t.sum), std::end(t.sum), Wide<T>{0});
  for (std::int64_t p = 0; p < k; p += Block::depth) {
    const std::int64_t depth = std::min(Block::depth, k - p);
    pack<block_rows>(from_col(a, p).data, a.row_stride, a.col_stride, rows, depth, t.a);
    pack<block_cols>(from_row(b, p).data, b.col_stride, b.row_stride, cols, depth, t.b);
    for (std::int64_t j = 0; j < cols; j += block_cols) {
      for (std::int64_t i = 0; i < rows; i += block_rows)
        multiply_block(t.a + i * depth, t.b + j * depth, depth, p == 0, t.sum + i * Block::max_cols + j);
    }
  }
}

}  // namespace stepgraph::cpu
