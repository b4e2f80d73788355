#include "ops/cpu/gemm/gemm.hpp"

#include <algorithm>
#include <concepts>
#include <memory>

#include "ops/cpu/gemm/blas.hpp"
#include "ops/cpu/gemm/gemm_bf16.hpp"
#include "ops/cpu/gemm/gemm_blocks.hpp"
#include "ops/cpu/gemm/gemm_choice.hpp"
#include "ops/cpu/gemm/gemm_cut.hpp"
#include "ops/cpu/gemm/gemm_watch.hpp"
#include "ops/cpu/into.hpp"
#include "ops/cpu/with_best.hpp"
#if defined(__aarch64__)
#include "ops/cpu/gemm/arm/neon.hpp"
#include "ops/cpu/gemm/arm/sve.hpp"
#elif defined(__x86_64__)
#include "ops/cpu/gemm/x86/x86.hpp"
#endif

namespace stepgraph {
namespace {

using cpu::Range;

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
  cpu::with_best([&] {
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
  });
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

// The activation of finished parts of a tile.
template <class T, class Out>
struct Activating {
  const Gemm<T, Out>& problem;
  const Range& tile;
  void operator()(std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols) const {
    if (problem.activate == nullptr) return;
    for (std::int64_t i = tile.row + row; i < tile.row + row + rows; ++i) {
      const std::int64_t at = i * problem.c_stride + tile.col + col;
      problem.activate(problem.c.out + at, problem.y + at, cols);
    }
  }
};
// Calls done(row, rows, col, cols), which must live as long.
template <class Done>
[[maybe_unused]] PartDone called(const Done& done) {
  return {[](const void* of, std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols) {
            (*static_cast<const Done*>(of))(row, rows, col, cols);
          },
          &done};
}

// The product of a tile. Bias and times are those of the problem if they have the type Side.
template <class Side, class T, class Out>
PanelProduct<T, Out, Side> product_of(const Gemm<T, Out>& problem, const Range& tile) {
  const std::int64_t first = tile.row * problem.c_stride + tile.col;
  PanelProduct<T, Out, Side> product{.m        = tile.rows,
                                     .n        = tile.cols,
                                     .k        = problem.k,
                                     .a        = from_row(problem.a, tile.row),
                                     .b        = from_col(problem.b, tile.col),
                                     .c        = problem.c.out + first,
                                     .base     = problem.c.base == nullptr ? nullptr : problem.c.base + first,
                                     .c_stride = problem.c_stride};
  if constexpr (std::same_as<T, Side>) {
    product.bias  = problem.bias == nullptr ? nullptr : problem.bias + tile.col;
    product.times = problem.times == nullptr ? nullptr : problem.times + first;
  }
  return product;
}

// Returns false if `kernel` is not one for bf16.
template <class Out>
bool bf16_tile([[maybe_unused]] const Gemm<bf16, Out>& problem, [[maybe_unused]] const Range& tile,
               [[maybe_unused]] GemmKernel kernel) {
#if defined(__aarch64__) || defined(__x86_64__)
  auto* multiply = decltype(&cpu::multiply_amx<Out>){};
#if defined(__aarch64__)
  if (kernel == GemmKernel::neon_bf16) multiply = cpu::multiply_neon_bf16<Out>;
#else
  if (kernel == GemmKernel::avx512_bf16) multiply = cpu::multiply_avx512_bf16<Out>;
  if (kernel == GemmKernel::amx) multiply = cpu::multiply_amx<Out>;
#endif
  if (multiply == nullptr) return false;
  const Activating<bf16, Out> activating{problem, tile};
  multiply(cpu::bf16_room(), product_of<bf16>(problem, tile), called(activating));
  return true;
#else
  return false;
#endif
}

// c = ((base +) a b (+ bias)) (times). Calls done(row, rows, col, cols) for finished parts of c.
template <class T, class Done>
void multiply_panels([[maybe_unused]] GemmKernel kernel, [[maybe_unused]] const PanelProduct<T>& product,
                     [[maybe_unused]] const Done& done) {
#if defined(__aarch64__)
  auto& packed = room<cpu::ArmBlocks>();
#ifdef STEPGRAPH_HAS_SVE
  if (kernel == GemmKernel::sve) {
    const std::int64_t lanes = cpu::sve_lanes();  // 4, 8 or 16: has() refuses others
    if (lanes == 4) return cpu::multiply_arm<cpu::SveKernel<4>>(packed, product, done);
    if (lanes == 8) return cpu::multiply_arm<cpu::SveKernel<8>>(packed, product, done);
    return cpu::multiply_arm<cpu::SveKernel<16>>(packed, product, done);
  }
#endif
  cpu::multiply_arm<cpu::NeonKernel>(packed, product, done);
#elif defined(__x86_64__)
  auto* const multiply = kernel == GemmKernel::avx512 ? cpu::multiply_avx512<T> : cpu::multiply_avx2<T>;
  multiply(room<cpu::X86Blocks>(), product, called(done));
#endif
}

// Writes into c itself, or into a buffer of sums if c or its bias is not f32. Returns false if this machine does not
// have the kernel or there is none for the type.
template <class T, class Out>
[[gnu::noinline]] bool panel_tile(const Gemm<T, Out>& problem, const Range& tile, GemmKernel kernel) {
  if constexpr (std::same_as<Wide<T>, float>) {
    if (problem.k == 0 || kernel == GemmKernel::own || !has(kernel)) return false;
    if constexpr (std::same_as<T, bf16>) {
      if (bf16_tile(problem, tile, kernel)) return true;
    }
    kernel = cpu::without_bf16(kernel);
    if constexpr (std::same_as<Out, float>) {
      if (std::same_as<T, float> || (problem.bias == nullptr && problem.times == nullptr)) {
        multiply_panels(kernel, product_of<float>(problem, tile), Activating<T, Out>{problem, tile});
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

template <class T, class Sum>
void multiply(const Gemm<T, Sum>& problem, const Range& range, GemmKernel kernel) {
  if (range.rows == 0 || range.cols == 0) return;
  if constexpr (watches) cpu::watch(problem, range);
  const bool fastest    = kernel == GemmKernel::fastest;
  const bool blas_first = fastest && cpu::cblas_first();
  const GemmKernel ours = !fastest ? kernel : std::same_as<T, bf16> ? cpu::best_bf16_kernel() : cpu::best_kernel();
  if (!blas_first && panel_tile(problem, range, ours)) return;
  if constexpr (std::same_as<T, Wide<T>>) {
    if (fastest && blas_tile(problem, range)) return;
  }
  if (blas_first && panel_tile(problem, range, ours)) return;
  own_tile(problem, range);
}

// Our kernels give an element the same bits in a larger tile. A BLAS does not guarantee that. There are tiles for 64
// threads. Products of f32 have two for each of them, because threads are not equally fast; kernels for bf16 would lose
// more in small tiles.
template <class T>
cpu::GemmCut cut_of(std::int64_t m, std::int64_t n, GemmKernel kernel) {
  const bool ours_first = !cpu::cblas_first() && std::same_as<Wide<T>, float> && cpu::best_kernel() != GemmKernel::own;
  const bool can_join =
      kernel != GemmKernel::fastest || ours_first || !std::same_as<T, Wide<T>> || cpu::blas_library().empty();
  return {m, n, !can_join ? 0 : std::same_as<T, float> ? 7 : 6};
}

}  // namespace

template <class T>
std::int64_t num_gemm_tiles(std::int64_t m, std::int64_t n, GemmKernel kernel) {
  if (m == 0 || n == 0) return 0;
  return cut_of<T>(m, n, kernel).num_tiles();
}

template <class T>
std::int64_t gemm_joined(std::int64_t m, std::int64_t n, GemmKernel kernel) {
  if (m == 0 || n == 0) return 1;
  return cut_of<T>(m, n, kernel).joined();
}

template <class T, class Sum>
void gemm_tiles(const Gemm<T, Sum>& problem, std::int64_t first, std::int64_t end, GemmKernel kernel) {
  if (first >= end) return;
  const cpu::GemmCut cut = cut_of<T>(problem.m, problem.n, kernel);
  while (first < end) {
    const cpu::GemmCut::Joined next = cut.from(first, end);
    multiply(problem, next.range, kernel);
    first += next.num_tiles;
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
