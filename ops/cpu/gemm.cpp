#include "ops/cpu/gemm.hpp"

#include <algorithm>
#include <concepts>
#include <memory>

#include "engine/base/watched.hpp"
#include "ops/cpu/blas.hpp"
#include "ops/cpu/gemm_blocks.hpp"
#include "ops/cpu/into.hpp"
#ifdef __aarch64__
#include "ops/cpu/gemm_neon.hpp"
#endif

namespace stepgraph {
namespace {

std::int64_t pieces(std::int64_t size, std::int64_t piece) { return (size + piece - 1) / piece; }

// How c is cut into tiles. Operands are packed again for each tile, so tiles are large, and wide rather than tall,
// which packs less. There are at least two tiles for two threads, and more where that costs almost nothing.
struct Cut {
  std::int64_t rows, cols;  // of a tile; the last ones may be smaller
};
Cut cut(std::int64_t m, std::int64_t n) {
  constexpr std::int64_t worth_cutting = 96 * 96, worth_four = 512 * 768, most = 1024 * 1024;
  std::int64_t down = 1, across = 1;
  Cut tile{m, n};
  const auto too_large = [&] {
    const std::int64_t area = tile.rows * tile.cols, tiles = down * across;
    return area > most || (tiles < 4 && area / 2 >= worth_four) || (tiles < 2 && area > worth_cutting);
  };
  while (too_large()) {
    const bool high = tile.rows > 512 ? 4 * tile.rows > tile.cols : tile.rows > tile.cols;
    (high ? down : across) *= 2;
    // Multiples of 8, the register block of the kernels.
    tile = {pieces(pieces(m, down), 8) * 8, pieces(pieces(n, across), 8) * 8};
  }
  return tile;
}

// A tile or a block of it: its start and its size.
struct Range {
  std::int64_t row, col, rows, cols;
};

// The epilogue after `count` consecutive elements in a row of c are stored, from element `at` on.
template <class T, class Out>
void follow(const Gemm<T, Out>& problem, std::int64_t at, std::int64_t count) {
  Out* const c = problem.c.out + at;
  if (problem.times != nullptr) {
    const T* const times = problem.times + at;
    for (std::int64_t j = 0; j < count; ++j) c[j] = narrow<Out>(wide(c[j]) * wide(times[j]));
  }
  if (problem.activate != nullptr) problem.activate(c, problem.y + at, count);
}

// Stores the product and runs the epilogue, row by row. sum(i, j) is the sum at row i and column j of the range.
template <class T, class Out, class Value>
void finish(const Gemm<T, Out>& problem, const Range& at, const Value& sum) {
  for (std::int64_t i = 0; i < at.rows; ++i) {
    const std::int64_t first = (at.row + i) * problem.c_stride + at.col;
    if (problem.bias != nullptr) {
      const T* const bias = problem.bias + at.col;
      cpu::put(problem.c, first, at.cols, [&](std::int64_t j) { return sum(i, j) + wide(bias[j]); });
    } else {
      cpu::put(problem.c, first, at.cols, [&](std::int64_t j) { return sum(i, j); });
    }
    follow(problem, first, at.cols);
  }
}

// A thread's scratch for packed operands. Allocated once, since it is too large for a stack.
template <class Room>
Room& room() {
  static thread_local const std::unique_ptr<Room> made(new Room);
  return *made;
}

template <class T, class Out>
void own_tile(const Gemm<T, Out>& problem, const Range& tile) {
  using Block  = cpu::GemmBlock<Wide<T>>;
  Block& block = room<Block>();
  for (std::int64_t row = tile.row; row < tile.row + tile.rows; row += Block::max_rows) {
    for (std::int64_t col = tile.col; col < tile.col + tile.cols; col += Block::max_cols) {
      const Range at{row, col, std::min(Block::max_rows, tile.row + tile.rows - row),
                     std::min(Block::max_cols, tile.col + tile.cols - col)};
      cpu::multiply_packed(block, from_row(problem.a, row), from_col(problem.b, col), at.rows, at.cols, problem.k);
      finish(problem, at, [&](std::int64_t i, std::int64_t j) { return block.sum[i * Block::max_cols + j]; });
    }
  }
}

#ifdef __aarch64__
constexpr bool has_neon = true;
#else
constexpr bool has_neon    = false;
#endif
// Whether products of f32 use a CBLAS that was requested by name.
#ifdef STEPGRAPH_CBLAS_FIRST
constexpr bool cblas_first = true;
#else
constexpr bool cblas_first = false;
#endif

// Writes into c itself, or into a buffer of sums if c or its bias is not f32. Returns false if there is no such kernel.
template <class T, class Out>
[[gnu::noinline]] bool neon_tile([[maybe_unused]] const Gemm<T, Out>& problem, [[maybe_unused]] const Range& tile) {
#ifdef __aarch64__
  if constexpr (std::same_as<Wide<T>, float>) {
    if (problem.k == 0) return false;
    cpu::NeonBlocks& packed = room<cpu::NeonBlocks>();
    if constexpr (std::same_as<Out, float>) {
      const std::int64_t first = tile.row * problem.c_stride + tile.col;
      cpu::NeonProduct<T> product{.m        = tile.rows,
                                  .n        = tile.cols,
                                  .k        = problem.k,
                                  .a        = from_row(problem.a, tile.row),
                                  .b        = from_col(problem.b, tile.col),
                                  .c        = problem.c.out + first,
                                  .base     = problem.c.base == nullptr ? nullptr : problem.c.base + first,
                                  .c_stride = problem.c_stride};
      if constexpr (std::same_as<T, float>) {
        product.bias  = problem.bias == nullptr ? nullptr : problem.bias + tile.col;
        product.times = problem.times == nullptr ? nullptr : problem.times + first;
      }
      if (std::same_as<T, float> || (problem.bias == nullptr && problem.times == nullptr)) {
        cpu::multiply_neon(packed, product,
                           [&](std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols) {
                             if (problem.activate == nullptr) return;
                             for (std::int64_t i = row; i < row + rows; ++i) {
                               const std::int64_t at = first + i * problem.c_stride + col;
                               problem.activate(problem.c.out + at, problem.y + at, cols);
                             }
                           });
        return true;
      }
    }
    constexpr std::int64_t max_rows = 256, max_cols = 384;
    struct Sums {
      alignas(64) float at[max_rows * max_cols];
    };
    float* const sums = room<Sums>().at;
    for (std::int64_t row = tile.row; row < tile.row + tile.rows; row += max_rows) {
      for (std::int64_t col = tile.col; col < tile.col + tile.cols; col += max_cols) {
        const Range at{row, col, std::min(max_rows, tile.row + tile.rows - row),
                       std::min(max_cols, tile.col + tile.cols - col)};
        cpu::multiply_neon(packed,
                           cpu::NeonProduct<T>{.m        = at.rows,
                                               .n        = at.cols,
                                               .k        = problem.k,
                                               .a        = from_row(problem.a, row),
                                               .b        = from_col(problem.b, col),
                                               .c        = sums,
                                               .c_stride = max_cols},
                           [](auto...) {});
        finish(problem, at, [&](std::int64_t i, std::int64_t j) { return sums[i * max_cols + j]; });
      }
    }
    return true;
  }
#endif
  return false;
}

// Adds to c itself, after copying the base there if needed. Returns false if the BLAS cannot compute it.
template <class T>
bool blas_tile(const Gemm<T>& problem, const Range& tile) {
  if (problem.k == 0) return false;
  const Into<T>& c         = problem.c;
  const std::int64_t first = tile.row * problem.c_stride + tile.col;
  if (c.base != nullptr && c.base != c.out) {
    for (std::int64_t i = 0; i < tile.rows; ++i)
      std::copy_n(c.base + first + i * problem.c_stride, tile.cols, c.out + first + i * problem.c_stride);
  }
  if (!cpu::blas_multiply({.m        = tile.rows,
                           .n        = tile.cols,
                           .k        = problem.k,
                           .a        = from_row(problem.a, tile.row),
                           .b        = from_col(problem.b, tile.col),
                           .c        = c.out + first,
                           .c_stride = problem.c_stride,
                           .adds     = c.base != nullptr})) {
    return false;
  }
  if (problem.bias == nullptr && problem.times == nullptr && problem.activate == nullptr) return true;
  Gemm<T> rest = problem;
  rest.c.base  = nullptr;
  finish(rest, tile, [&](std::int64_t i, std::int64_t j) { return c.out[first + i * problem.c_stride + j]; });
  return true;
}

}  // namespace

std::string_view gemm_library() {
  const std::string_view blas = cpu::blas_library();
  if (has_neon && (!cblas_first || blas.empty())) return "neon";
  return blas.empty() ? "own" : blas;
}

std::int64_t num_gemm_tiles(std::int64_t m, std::int64_t n) {
  if (m == 0 || n == 0) return 0;
  const Cut tile = cut(m, n);
  return pieces(m, tile.rows) * pieces(n, tile.cols);
}

namespace {

// Tells ThreadSanitizer about the elements of `rows` x `cols`, row by row or column by column.
template <class T>
void watch_matrix(const Matrix<T>& matrix, std::int64_t rows, std::int64_t cols) {
  const bool by_row             = matrix.col_stride == 1;
  const std::int64_t lines      = by_row ? rows : cols;
  const std::int64_t line       = by_row ? cols : rows;
  const std::int64_t to_line    = by_row ? matrix.row_stride : matrix.col_stride;
  const std::int64_t to_element = by_row ? 1 : matrix.row_stride;
  for (std::int64_t i = 0; i < lines; ++i) {
    if (to_element == 1) {
      watch_read(matrix.data + i * to_line, static_cast<std::size_t>(line) * sizeof(T));
      continue;
    }
    for (std::int64_t j = 0; j < line; ++j) watch_read(matrix.data + i * to_line + j * to_element, sizeof(T));
  }
}

// This file is compiled without ThreadSanitizer, and a BLAS always is.
template <class T, class Sum>
void watch(const Gemm<T, Sum>& problem, const Range& at) {
  const auto cols = static_cast<std::size_t>(at.cols);
  watch_matrix(from_row(problem.a, at.row), at.rows, problem.k);
  watch_matrix(from_col(problem.b, at.col), problem.k, at.cols);
  if (problem.bias != nullptr) watch_read(problem.bias + at.col, cols * sizeof(T));
  for (std::int64_t row = at.row; row < at.row + at.rows; ++row) {
    const std::int64_t first = row * problem.c_stride + at.col;
    if (problem.c.base != nullptr) watch_read(problem.c.base + first, cols * sizeof(*problem.c.base));
    if (problem.times != nullptr) watch_read(problem.times + first, cols * sizeof(T));
    watch_write(problem.c.out + first, cols * sizeof(Sum));
  }
}

template <class T, class Sum>
void multiply(const Gemm<T, Sum>& problem, const Range& range, GemmKernel kernel) {
  if constexpr (watches) watch(problem, range);
  const bool fastest = kernel == GemmKernel::fastest;
  if ((kernel == GemmKernel::neon || (fastest && !cblas_first)) && neon_tile(problem, range)) return;
  if constexpr (std::same_as<T, Wide<T>>) {
    if (fastest && blas_tile(problem, range)) return;
  }
  if (fastest && cblas_first && neon_tile(problem, range)) return;
  own_tile(problem, range);
}

}  // namespace

// Our kernels give an element the same bits in a larger tile. A BLAS does not guarantee that.
template <class T>
bool gemm_joins(GemmKernel kernel) {
  const bool neon_first = has_neon && !cblas_first && std::same_as<Wide<T>, float>;
  return kernel != GemmKernel::fastest || neon_first || !std::same_as<T, Wide<T>> || cpu::blas_library().empty();
}

template <class T, class Sum>
void gemm_tiles(const Gemm<T, Sum>& problem, std::int64_t first, std::int64_t end, GemmKernel kernel) {
  const Cut size            = cut(problem.m, problem.n);
  const std::int64_t across = pieces(problem.n, size.cols);
  for (std::int64_t tile = first, next; tile < end; tile = next) {
    std::int64_t down = 1;
    next              = tile + 1;
    if (gemm_joins<T>(kernel)) {
      // Whole rows of tiles, or the rest of one row.
      down = tile % across == 0 ? std::max<std::int64_t>((end - tile) / across, 1) : 1;
      next = down > 1 ? tile + down * across : std::min(end, (tile / across + 1) * across);
    }
    const std::int64_t row = tile / across * size.rows, col = tile % across * size.cols;
    const std::int64_t cols = (down > 1 ? across : next - tile) * size.cols;
    multiply(problem, {row, col, std::min(down * size.rows, problem.m - row), std::min(cols, problem.n - col)}, kernel);
  }
}

template bool gemm_joins<float>(GemmKernel);
template bool gemm_joins<double>(GemmKernel);
template bool gemm_joins<bf16>(GemmKernel);
template bool gemm_joins<f16>(GemmKernel);
template void gemm_tiles(const Gemm<float>&, std::int64_t, std::int64_t, GemmKernel);
template void gemm_tiles(const Gemm<double>&, std::int64_t, std::int64_t, GemmKernel);
template void gemm_tiles(const Gemm<bf16>&, std::int64_t, std::int64_t, GemmKernel);
template void gemm_tiles(const Gemm<bf16, float>&, std::int64_t, std::int64_t, GemmKernel);
template void gemm_tiles(const Gemm<f16>&, std::int64_t, std::int64_t, GemmKernel);
template void gemm_tiles(const Gemm<f16, float>&, std::int64_t, std::int64_t, GemmKernel);

}  // namespace stepgraph
