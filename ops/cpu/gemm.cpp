#include "ops/cpu/gemm.hpp"

#include <algorithm>
#include <bit>
#include <concepts>
#include <memory>

#include "engine/base/watched.hpp"
#include "ops/cpu/blas.hpp"
#include "ops/cpu/gemm_blocks.hpp"
#include "ops/cpu/instructions.hpp"
#include "ops/cpu/into.hpp"
#if defined(__aarch64__)
#include "ops/cpu/gemm_neon.hpp"
#elif defined(__x86_64__)
#include "ops/cpu/gemm_x86.hpp"
#endif

namespace stepgraph {
namespace {

std::int64_t pieces(std::int64_t size, std::int64_t piece) { return (size + piece - 1) / piece; }

// A tile or a block of it: its start and its size.
struct Range {
  std::int64_t row, col, rows, cols;
};

// How c is cut into tiles: halved again and again, by rows or by columns. The bits of a tile's number say which halves
// it is in; the highest bit is that of the first cut.
struct Cut {
  std::int64_t m, n;
  int large = 0, all = 0;  // how often it is cut: into large tiles, for two threads; into all tiles, for many
  std::uint64_t by_rows = 0;

  Cut(std::int64_t rows, std::int64_t cols) : m(rows), n(cols) {
    // Operands are packed again for each tile, so tiles are large, and wide rather than tall, which packs less. There
    // are at least two tiles for two threads, and more where that costs almost nothing.
    constexpr std::int64_t worth_cutting = 96 * 96, worth_four = 512 * 768, most = 1024 * 1024;
    const auto too_large = [&] {
      const std::int64_t area = rows * cols, tiles = std::int64_t{1} << all;
      return area > most || (tiles < 4 && area / 2 >= worth_four) || (tiles < 2 && area > worth_cutting);
    };
    std::int64_t down = 1, across = 1;
    const auto halve = [&] {
      const bool high = rows > 512 ? 4 * rows > cols : rows > cols;
      if (high) by_rows |= std::uint64_t{1} << all;
      (high ? down : across) *= 2;
      ++all;
      rows = pieces(pieces(m, down), 8) * 8;
      cols = pieces(pieces(n, across), 8) * 8;
    };
    while (too_large()) halve();
    large = all;
    // A thread that gets several of these computes them as one.
    while (all > 0 && all < 6 && rows * cols >= 2 * 32 * 64) halve();
  }

  // The rectangle of 2^joins tiles, from tile `first` on, a multiple of their number.
  [[nodiscard]] Range range(std::int64_t first, int joins) const {
    std::int64_t row = 0, col = 0, down = 1, across = 1;
    for (int cut = 0; cut < all - joins; ++cut) {
      const std::int64_t second = first >> (all - 1 - cut) & 1;
      const bool high           = by_rows >> cut & 1;
      (high ? row : col)        = 2 * (high ? row : col) + second;
      (high ? down : across) *= 2;
    }
    // Multiples of the register blocks of most kernels.
    const auto at = [](std::int64_t size, std::int64_t part, std::int64_t parts, std::int64_t by) {
      return part == parts ? size : std::min(size, (size * part / parts + by / 2) / by * by);
    };
    const std::int64_t top = at(m, row, down, 8), left = at(n, col, across, 16);
    return {top, left, at(m, row + 1, down, 8) - top, at(n, col + 1, across, 16) - left};
  }
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

// Whether products of f32 use a CBLAS that was requested by name.
#ifdef STEPGRAPH_CBLAS_FIRST
constexpr bool cblas_first = true;
#else
constexpr bool cblas_first = false;
#endif

// The kernel of ours that this machine runs fastest.
GemmKernel best_kernel() {
  if (has(GemmKernel::neon)) return GemmKernel::neon;
  switch (cpu::best_instructions()) {
    case cpu::Instructions::avx512:
      return GemmKernel::avx512;
    case cpu::Instructions::avx2:
      return GemmKernel::avx2;
    default:
      return GemmKernel::own;
  }
}

// c = ((base +) a b (+ bias)) (times). Calls done(row, rows, col, cols) for finished parts of c.
template <class T, class Done>
void multiply_panels([[maybe_unused]] GemmKernel kernel, [[maybe_unused]] const PanelProduct<T>& product,
                     [[maybe_unused]] const Done& done) {
#if defined(__aarch64__)
  cpu::multiply_neon(room<cpu::NeonBlocks>(), product, done);
#elif defined(__x86_64__)
  const cpu::X86Done call{[](const void* of, std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols) {
                            (*static_cast<const Done*>(of))(row, rows, col, cols);
                          },
                          &done};
  auto* const multiply = kernel == GemmKernel::avx512 ? cpu::multiply_avx512<T> : cpu::multiply_avx2<T>;
  multiply(room<cpu::X86Blocks>(), product, call);
#endif
}

// Writes into c itself, or into a buffer of sums if c or its bias is not f32. Returns false if this machine does not
// have the kernel or there is none for the type.
template <class T, class Out>
[[gnu::noinline]] bool panel_tile(const Gemm<T, Out>& problem, const Range& tile, GemmKernel kernel) {
  if constexpr (std::same_as<Wide<T>, float>) {
    if (problem.k == 0 || kernel == GemmKernel::own || !has(kernel)) return false;
    if constexpr (std::same_as<Out, float>) {
      const std::int64_t first = tile.row * problem.c_stride + tile.col;
      PanelProduct<T> product{.m        = tile.rows,
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
        multiply_panels(kernel, product, [&](std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols) {
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
        multiply_panels(kernel,
                        PanelProduct<T>{.m        = at.rows,
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

bool has(GemmKernel kernel) noexcept {
  switch (kernel) {
    case GemmKernel::neon:
#ifdef __aarch64__
      return true;
#else
      return false;
#endif
    case GemmKernel::avx2:
      return cpu::has(cpu::Instructions::avx2);
    case GemmKernel::avx512:
      return cpu::has(cpu::Instructions::avx512);
    default:
      return true;
  }
}

std::string_view gemm_library() {
  const std::string_view blas = cpu::blas_library();
  if (cblas_first && !blas.empty()) return blas;
  switch (best_kernel()) {
    case GemmKernel::neon:
      return "neon";
    case GemmKernel::avx2:
      return "avx2";
    case GemmKernel::avx512:
      return "avx512";
    default:
      return blas.empty() ? "own" : blas;
  }
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
  if (range.rows == 0 || range.cols == 0) return;
  if constexpr (watches) watch(problem, range);
  const bool fastest    = kernel == GemmKernel::fastest;
  const GemmKernel ours = fastest ? best_kernel() : kernel;
  if (!(fastest && cblas_first) && panel_tile(problem, range, ours)) return;
  if constexpr (std::same_as<T, Wide<T>>) {
    if (fastest && blas_tile(problem, range)) return;
  }
  if (fastest && cblas_first && panel_tile(problem, range, ours)) return;
  own_tile(problem, range);
}

// Our kernels give an element the same bits in a larger tile. A BLAS does not guarantee that.
template <class T>
bool can_join(GemmKernel kernel) {
  const bool ours_first = !cblas_first && std::same_as<Wide<T>, float> && best_kernel() != GemmKernel::own;
  return kernel != GemmKernel::fastest || ours_first || !std::same_as<T, Wide<T>> || cpu::blas_library().empty();
}

}  // namespace

template <class T>
std::int64_t num_gemm_tiles(std::int64_t m, std::int64_t n, GemmKernel kernel) {
  if (m == 0 || n == 0) return 0;
  const Cut cut(m, n);
  return std::int64_t{1} << (can_join<T>(kernel) ? cut.all : cut.large);
}

template <class T>
std::int64_t gemm_joined(std::int64_t m, std::int64_t n, GemmKernel kernel) {
  if (m == 0 || n == 0 || !can_join<T>(kernel)) return 1;
  const Cut cut(m, n);
  return std::int64_t{1} << (cut.all - cut.large);
}

template <class T, class Sum>
void gemm_tiles(const Gemm<T, Sum>& problem, std::int64_t first, std::int64_t end, GemmKernel kernel) {
  if (first >= end) return;
  Cut cut(problem.m, problem.n);
  const bool joins = can_join<T>(kernel);
  if (!joins) cut.all = cut.large;
  while (first < end) {
    int doubled = 0;
    if (joins) {
      doubled = first == 0 ? cut.all : std::countr_zero(static_cast<std::uint64_t>(first));
      while (first + (std::int64_t{1} << doubled) > end) --doubled;
    }
    multiply(problem, cut.range(first, doubled), kernel);
    first += std::int64_t{1} << doubled;
  }
}

#define STEPGRAPH_TILES(T)                                                         \
  template std::int64_t num_gemm_tiles<T>(std::int64_t, std::int64_t, GemmKernel); \
  template std::int64_t gemm_joined<T>(std::int64_t, std::int64_t, GemmKernel)
STEPGRAPH_TILES(float);
STEPGRAPH_TILES(double);
STEPGRAPH_TILES(bf16);
STEPGRAPH_TILES(f16);
#undef STEPGRAPH_TILES
template void gemm_tiles(const Gemm<float>&, std::int64_t, std::int64_t, GemmKernel);
template void gemm_tiles(const Gemm<double>&, std::int64_t, std::int64_t, GemmKernel);
template void gemm_tiles(const Gemm<bf16>&, std::int64_t, std::int64_t, GemmKernel);
template void gemm_tiles(const Gemm<bf16, float>&, std::int64_t, std::int64_t, GemmKernel);
template void gemm_tiles(const Gemm<f16>&, std::int64_t, std::int64_t, GemmKernel);
template void gemm_tiles(const Gemm<f16, float>&, std::int64_t, std::int64_t, GemmKernel);

}  // namespace stepgraph
