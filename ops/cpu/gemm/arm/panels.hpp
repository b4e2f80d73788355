#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/cpu/gemm/arm/pack.hpp"

// Our product for 64-bit Arm, around register blocks of NEON or SVE. The left operand is packed in blocks that stay in
// the second-level cache, the right one in a few panels, one of which stays in the first-level cache.
namespace stepgraph::cpu {

inline constexpr std::int64_t arm_rows = 8;  // of a register block

// How columns are cut into panels: of 3 vectors, and one or two of 2 where that leaves fewer unused lanes.
template <std::int64_t lanes>
struct ArmPanels {
  std::int64_t threes, all;
  explicit ArmPanels(std::int64_t cols) : threes(cols / (3 * lanes)), all(threes) {
    const std::int64_t rest = cols % (3 * lanes);
    if (rest > 2 * lanes) {
      all = ++threes;
    } else if (rest > lanes || (rest > 0 && threes == 0)) {
      all = threes + 1;
    } else if (rest > 0) {
      all = --threes + 2;
    }
  }
  [[nodiscard]] std::int64_t col(std::int64_t panel) const { return lanes * (2 * panel + std::min(panel, threes)); }
};

// A thread's packed operands, of all kernels. Blocks of NEON read up to 48 bytes beyond the end.
struct ArmBlocks {
  static constexpr std::int64_t max_rows = 512, b_size = 96 * 512;
  alignas(64) float a[max_rows * 512 + 12];
  alignas(64) float b[b_size + 12];
};

// A block of rows and of k. `padded` is `depth` rounded up to a whole panel.
struct ArmStep {
  std::int64_t row, rows, first, depth, padded;
};

// Packs panels [begin, end) of the right operand. Each one takes the space of a panel of 3 vectors.
template <std::int64_t lanes, class T>
void pack_right(ArmBlocks& packed, const PanelProduct<T>& product, const ArmPanels<lanes>& panels, const ArmStep& step,
                std::int64_t begin, std::int64_t end) {
  const Matrix<T> b             = from_row(product.b, step.first);
  const std::int64_t panel_size = 3 * lanes * step.padded, split = std::clamp(panels.threes, begin, end);
  const auto pack = [&]<std::int64_t width>(std::int64_t from, std::int64_t to) {
    const std::int64_t col = std::min(product.n, panels.col(from)), cols = std::min(product.n, panels.col(to)) - col;
    pack_panels<width>(from_col(b, col).data, b.col_stride, b.row_stride, cols, step.depth,
                       packed.b + (from - begin) * panel_size, panel_size);
  };
  pack.template operator()<3 * lanes>(begin, split);
  pack.template operator()<2 * lanes>(split, end);
}

// All packed rows times one panel, which starts at column `col`.
template <class Kernel, int vectors, class T>
void multiply_column(const ArmBlocks& packed, const PanelProduct<T>& product, const ArmStep& step, std::int64_t col,
                     const float* right) {
  const bool last          = step.first + step.depth == product.k;
  const float* const base  = step.first == 0 ? product.base : product.c;
  const float* const bias  = last && product.bias != nullptr ? product.bias + col : nullptr;
  const float* const times = last ? product.times : nullptr;
  const std::int64_t start = step.row * product.c_stride + col;
  for (std::int64_t i = 0; i < step.rows; i += arm_rows) {
    const std::int64_t at = start + i * product.c_stride;
    const PanelOut to{product.c + at, base == nullptr ? nullptr : base + at, product.c_stride, bias,
                      times == nullptr ? nullptr : times + at};
    Kernel::template multiply<vectors>(packed.a + i * step.padded, right, step.depth, to,
                                       std::min(arm_rows, step.rows - i), product.n - col);
  }
}

// Kernel has `lanes`, the number of f32 in its vectors; `max_depth`, the most steps of k in a block; and
// multiply<vectors>(a, b, depth, to, rows, cols) for a register block of arm_rows rows by 2 or 3 vectors, of which
// `rows` rows and `cols` columns exist (or more than all columns).
//
// Calls done(row, rows, col, cols) for finished parts of c while they are in cache. k is not 0. The bits of an element
// depend only on its row, its column, base, bias and k: sums over blocks of k, whose length follows from k, are added
// to the base one after the other.
template <class Kernel, class T, class Done>
void multiply_arm(ArmBlocks& packed, const PanelProduct<T>& product, const Done& done) {
  constexpr std::int64_t max_depth = Kernel::max_depth, width = 3 * Kernel::lanes;
  constexpr std::int64_t max_panels = ArmBlocks::b_size / (width * max_depth);
  static_assert(max_depth <= 512 && max_panels > 0);
  const std::int64_t blocks = (product.k + max_depth - 1) / max_depth;
  const std::int64_t length = padded_depth((product.k + blocks - 1) / blocks);
  const ArmPanels<Kernel::lanes> panels(product.n);
  for (std::int64_t row = 0; row < product.m; row += ArmBlocks::max_rows) {
    for (std::int64_t first = 0; first < product.k; first += length) {
      const std::int64_t depth = std::min(length, product.k - first);
      const ArmStep step{row, std::min(ArmBlocks::max_rows, product.m - row), first, depth, padded_depth(depth)};
      const Matrix<T> a = from_col(from_row(product.a, row), first);
      pack_panels<arm_rows>(a.data, a.row_stride, a.col_stride, step.rows, depth, packed.a, arm_rows * step.padded);
      for (std::int64_t begin = 0; begin < panels.all; begin += max_panels) {
        const std::int64_t end = std::min(panels.all, begin + max_panels);
        pack_right(packed, product, panels, step, begin, end);
        for (std::int64_t panel = begin; panel < end; ++panel) {
          const float* const right = packed.b + (panel - begin) * width * step.padded;
          if (panel < panels.threes) {
            multiply_column<Kernel, 3>(packed, product, step, panels.col(panel), right);
          } else {
            multiply_column<Kernel, 2>(packed, product, step, panels.col(panel), right);
          }
        }
        const std::int64_t col = panels.col(begin);
        if (first + depth == product.k) done(row, step.rows, col, std::min(product.n, panels.col(end)) - col);
      }
    }
  }
}

}  // namespace stepgraph::cpu
