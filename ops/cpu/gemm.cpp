#include "ops/cpu/gemm.hpp"

#include <algorithm>

namespace stepgraph {
namespace {

// The sums of a register block stay in vector registers: 18 of 32 there, 12 of 16 elsewhere, the rest for operands.
// Bits are the same for both.
#if defined(__aarch64__)
constexpr std::int64_t block_rows = 6, block_vectors = 3;
#else
constexpr std::int64_t block_rows = 6, block_vectors = 2;
#endif
constexpr std::int64_t tile_rows = 96, tile_cols = 96;  // multiples of the block's, for either type

template <class T>
struct Tile {
  typedef T Vector __attribute__((vector_size(16), may_alias));
  static constexpr std::int64_t lanes      = 16 / sizeof(T);
  static constexpr std::int64_t block_cols = block_vectors * lanes;
  static constexpr std::int64_t depth = 1024 / sizeof(T);  // of a block of k; part of what the sums' bits depend on
  static_assert(tile_rows % block_rows == 0 && tile_cols % block_cols == 0);

  // Both packed so that the innermost loop reads straight on: for each block of rows (columns), k by k.
  alignas(64) T a[tile_rows * depth];
  alignas(64) T b[tile_cols * depth];
  alignas(64) T sum[tile_rows * tile_cols];
};

// Lanes [0, used) of `width` from `matrix`, for each of `depth` steps along its other dim; lanes beyond are zero, and
// go through the same arithmetic. `across` and `along` are strides.
template <std::int64_t width, class T>
void pack_block(const T* from, std::int64_t across, std::int64_t along, std::int64_t used, std::int64_t depth, T* to) {
  if (used == width && across == 1) {
    for (std::int64_t p = 0; p < depth; ++p) std::copy_n(from + p * along, width, to + p * width);
    return;
  }
  for (std::int64_t i = 0; i < width; ++i) {
    for (std::int64_t p = 0; p < depth; ++p) to[p * width + i] = i < used ? from[i * across + p * along] : T{0};
  }
}

template <std::int64_t width, class T>
void pack(const T* from, std::int64_t across, std::int64_t along, std::int64_t used, std::int64_t depth, T* to) {
  for (std::int64_t i = 0; i < used; i += width)
    pack_block<width>(from + i * across, across, along, std::min(width, used - i), depth, to + i * depth);
}

// sum (+)= a b for one register block over one block of k.
template <class T>
void multiply(const T* a, const T* b, std::int64_t depth, bool first, T* sum) {
  using Vector = typename Tile<T>::Vector;
  Vector acc[block_rows][block_vectors];
#pragma GCC unroll 6
  for (std::int64_t i = 0; i < block_rows; ++i) {
#pragma GCC unroll 3
    for (std::int64_t j = 0; j < block_vectors; ++j) acc[i][j] = Vector{};
  }
  for (std::int64_t p = 0; p < depth; ++p) {
    const auto* const right = reinterpret_cast<const Vector*>(b + p * Tile<T>::block_cols);
#pragma GCC unroll 6
    for (std::int64_t i = 0; i < block_rows; ++i) {
      const T left = a[p * block_rows + i];
#pragma GCC unroll 3
      for (std::int64_t j = 0; j < block_vectors; ++j) acc[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 6
  for (std::int64_t i = 0; i < block_rows; ++i) {
    auto* const row = reinterpret_cast<Vector*>(sum + i * tile_cols);
#pragma GCC unroll 3
    for (std::int64_t j = 0; j < block_vectors; ++j) row[j] = first ? acc[i][j] : row[j] + acc[i][j];
  }
}

}  // namespace

std::int64_t num_gemm_tiles(std::int64_t m, std::int64_t n) {
  return ((m + tile_rows - 1) / tile_rows) * ((n + tile_cols - 1) / tile_cols);
}

template <class T>
void gemm_tile(const Gemm<T>& problem, std::int64_t tile) {
  constexpr std::int64_t block_cols = Tile<T>::block_cols;
  const std::int64_t across         = (problem.n + tile_cols - 1) / tile_cols;
  const std::int64_t row = tile / across * tile_rows, col = tile % across * tile_cols;
  const std::int64_t rows = std::min(tile_rows, problem.m - row), cols = std::min(tile_cols, problem.n - col);
  const Matrix<T>&a = problem.a, &b = problem.b;
  Tile<T> t;
  if (problem.k == 0) std::fill(std::begin(t.sum), std::end(t.sum), T{0});
  for (std::int64_t p = 0; p < problem.k; p += Tile<T>::depth) {
    const std::int64_t depth = std::min(Tile<T>::depth, problem.k - p);
    pack<block_rows>(a.data + row * a.row_stride + p * a.col_stride, a.row_stride, a.col_stride, rows, depth, t.a);
    pack<block_cols>(b.data + p * b.row_stride + col * b.col_stride, b.col_stride, b.row_stride, cols, depth, t.b);
    for (std::int64_t j = 0; j < cols; j += block_cols) {
      for (std::int64_t i = 0; i < rows; i += block_rows)
        multiply(t.a + i * depth, t.b + j * depth, depth, p == 0, t.sum + i * tile_cols + j);
    }
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    const T* const sum    = t.sum + i * tile_cols;
    const std::int64_t at = (row + i) * problem.c_stride + col;
    if (problem.bias != nullptr) {
      for (std::int64_t j = 0; j < cols; ++j) problem.c.put(at + j, sum[j] + problem.bias[col + j]);
    } else {
      for (std::int64_t j = 0; j < cols; ++j) problem.c.put(at + j, sum[j]);
    }
  }
}

template void gemm_tile<float>(const Gemm<float>&, std::int64_t);
template void gemm_tile<double>(const Gemm<double>&, std::int64_t);

}  // namespace stepgraph
