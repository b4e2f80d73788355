#pragma once
#include <cstdint>

#include "ops/cpu/gemm/x86/ahead.hpp"
#include "ops/cpu/gemm/x86/pack.hpp"

// The product of ops/cpu/gemm/x86/x86.hpp for vectors of one width. A panel of columns stays in the first-level cache,
// and all panels of rows pass by it. They are the narrower ones, so that less comes from the second-level cache: with
// AVX-512 about 4 bytes per cycle. Everything is in an anonymous namespace, because each file that includes this header
// compiles it for other instructions.
namespace stepgraph::cpu {
namespace {

// --- register blocks -------------------------------------------------------------------------------------------------

// The output of a register block: out = ((base +) sums (+ bias)) (times).
struct X86Out {
  float* out;
  const float* base;
  std::int64_t stride;
  const float* bias;
  const float* times;
  std::int64_t cols;  // columns that exist, where they are not all
};

// One register block over one block of k. `Lanes` has the vectors' operations. a is packed in panels of `width` rows;
// the first `rows` of them exist. If `in_place`, a is not packed: steps of k are adjacent, and its rows `stride_of_a`
// apart. If not `whole`, only some columns exist. Lines of `ahead` are fetched meanwhile. Each element always gets the
// same operations.
template <class Lanes, int width, int vectors, int rows, bool whole, bool in_place>
void multiply_panels(const float* a, std::int64_t stride_of_a, const float* b, std::int64_t depth, const X86Out& to,
                     LinesAhead& ahead) {
  using V             = typename Lanes::Vector;
  constexpr int lanes = Lanes::size, unrolled = 4;
  // Copies, because the compiler cannot exclude that stores modify `to`.
  const auto [out, base, stride, bias, times, cols] = to;
  typename Lanes::Mask masks[vectors];
  if constexpr (!whole) {
    for (int j = 0; j < vectors; ++j) masks[j] = Lanes::mask(cols - j * lanes);
  }
  const auto get = [&](const float* from, int j) __attribute__((always_inline)) {
    if constexpr (whole)
      return Lanes::load(from + j * lanes);
    else
      return Lanes::load(from + j * lanes, masks[j]);
  };
  V sum[rows][vectors];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) sum[i][j] = Lanes::zero();
  }
  // A pointer for three rows of a: x86 can add one or two strides to it while it loads.
  constexpr int num_starts = in_place ? (rows + 2) / 3 : 1;
  const float* starts[num_starts];
#pragma GCC unroll 4
  for (int i = 0; i < num_starts; ++i) {
    starts[i] = a + 3 * i * stride_of_a;
    asm("" : "+r"(starts[i]));  // else the compiler computes all of them from `a` at each step
  }
  const auto step = [&](int p) __attribute__((always_inline)) {
    V right[vectors];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) right[j] = Lanes::load(b + (p * vectors + j) * lanes);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const float& one = in_place ? starts[i / 3][i % 3 * stride_of_a + p] : starts[0][p * width + i];
      // Multiply-adds of these rows read the element themselves: fewer instructions, and more loads. In place its
      // address has an index, and then they are two instructions again.
      if constexpr (!in_place && Lanes::rows_from_memory > 0) {
        if (i < Lanes::rows_from_memory) {
#pragma GCC unroll 4
          for (int j = 0; j < vectors; ++j) sum[i][j] = Lanes::multiply_add_all(one, right[j], sum[i][j]);
          continue;
        }
      }
      const V left = Lanes::all(one);
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) sum[i][j] = Lanes::multiply_add(left, right[j], sum[i][j]);
    }
  };
  const auto steps = [&](int number) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int p = 0; p < number; ++p) step(p);
#pragma GCC unroll 4
    for (int i = 0; i < num_starts; ++i) starts[i] += in_place ? number : number * width;
    b += number * lanes * vectors;
  };
  // Rows of the output are fetched one by one: all at once would keep the operands waiting.
  const std::int64_t many = depth / unrolled, fetched = least(many, rows);
  const float* row = out;
  for (std::int64_t i = 0; i < fetched; ++i, row += stride) {
    __builtin_prefetch(row, 1);
    if constexpr (whole) {
      if constexpr (vectors * lanes > 16) __builtin_prefetch(row + 16, 1);
      __builtin_prefetch(row + lanes * vectors - 1, 1);
    }
    steps(unrolled);
  }
  LinesAhead next        = ahead;  // a copy, too
  std::int64_t num_lines = next.take(many - fetched);
  for (std::int64_t i = fetched; i < many; ++i) {
    if (num_lines-- > 0) next.fetch();
    steps(unrolled);
  }
  ahead = next;
  for (std::int64_t p = many * unrolled; p < depth; ++p) steps(1);
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) {
      V value = sum[i][j];
      if (base != nullptr) value = Lanes::add(get(base + i * stride, j), value);
      if (bias != nullptr) value = Lanes::add(value, get(bias, j));
      if (times != nullptr) value = Lanes::multiply(value, get(times + i * stride, j));
      if constexpr (whole)
        Lanes::store(out + i * stride + j * lanes, value);
      else
        Lanes::store(out + i * stride + j * lanes, value, masks[j]);
    }
  }
}

using X86Panels = void (*)(const float* a, std::int64_t stride_of_a, const float* b, std::int64_t depth,
                           const X86Out& to, LinesAhead& ahead);

// multiply_panels for 1 to `width` rows.
template <class Lanes, int width, int vectors>
struct PanelTable {
  X86Panels whole[width + 1] = {}, some[width + 1] = {};
  template <bool in_place, int rows = width>
  [[nodiscard]] static constexpr PanelTable make() {
    PanelTable table;
    if constexpr (rows > 0) {
      table             = make<in_place, rows - 1>();
      table.whole[rows] = multiply_panels<Lanes, width, vectors, rows, true, in_place>;
      table.some[rows]  = multiply_panels<Lanes, width, vectors, rows, false, in_place>;
    }
    return table;
  }
};
template <class Lanes, int width, int vectors, bool in_place>
constexpr auto panel_table = PanelTable<Lanes, width, vectors>::template make<in_place>();

// --- the product -----------------------------------------------------------------------------------------------------

// The length of parts that cover `size`: almost equal, at most `most`, a multiple of `of`.
inline std::int64_t equal_parts(std::int64_t size, std::int64_t most, std::int64_t of) {
  const std::int64_t parts = (size + most - 1) / most;
  return ((size + parts - 1) / parts + of - 1) / of * of;
}

// a if multiply_panels can read it in place, else null.
inline const float* readable(const Matrix<float>& a) { return a.col_stride == 1 ? a.data : nullptr; }
template <class T>
const float* readable(const Matrix<T>&) {
  return nullptr;
}

// Register blocks are `width` rows by `vectors` vectors. Up to `max_rows` rows and `max_cols` columns are packed at a
// time (ops/cpu/gemm/x86/x86.hpp). For at most `few_cols` columns, packing rows takes longer than it saves.
template <class Lanes, int width, int vectors, std::int64_t max_rows, std::int64_t max_cols, std::int64_t few_cols,
          class T>
void multiply_blocks(X86Blocks& packed, const PanelProduct<T>& product, const PartDone& done) {
  constexpr std::int64_t panel = vectors * Lanes::size, max_depth = X86Blocks::max_depth;
  constexpr std::int64_t done_cols = 8 * panel;  // as many as make a call worth it and are still in cache
  static_assert(max_cols % panel == 0 && max_cols <= X86Blocks::max_cols);
  static_assert(max_rows % width == 0 && max_rows <= X86Blocks::max_rows);
  if (product.m <= 0 || product.n <= 0) return;
  const std::int64_t m = product.m, n = product.n, k = product.k, stride = product.c_stride;
  const Matrix<T>&a = product.a, &b = product.b;
  const PanelTable<Lanes, width, vectors>* table = &panel_table<Lanes, width, vectors, false>;
  const float* in_place                          = nullptr;
  if constexpr (few_cols > 0) {
    if (n <= few_cols) in_place = readable(a);
    if (in_place != nullptr) table = &panel_table<Lanes, width, vectors, true>;
  }
  const std::int64_t length = equal_parts(k, max_depth, 4);
  const std::int64_t across = equal_parts(n, max_cols, panel), down = equal_parts(m, max_rows, width);
  for (std::int64_t left = 0; left < n; left += across) {
    const std::int64_t right = least(n, left + across);
    for (std::int64_t first = 0; first < k; first += length) {
      const std::int64_t depth = least(length, k - first);
      const bool last          = first + depth == k;
      const float* const base  = first == 0 ? product.base : product.c;
      const float* const times = last ? product.times : nullptr;
      pack_panels<Lanes, static_cast<int>(panel)>(columns_of(b, left, first, right - left, depth), packed.b);
      for (std::int64_t top = 0; top < m; top += down) {
        const std::int64_t bottom = least(m, top + down);
        const float* block_of_a   = packed.a;
        if (in_place != nullptr) {
          block_of_a = in_place + top * a.row_stride + first;
        } else {
          pack_panels<Lanes, width>(rows_of(a, top, first, bottom - top, depth), packed.a);
        }
        // What is packed next: rows for the same columns; after the last rows, the next steps of k; after the last of
        // these, the next columns.
        const std::int64_t num_blocks = (bottom - top + width - 1) / width * ((right - left + panel - 1) / panel);
        LinesAhead ahead;
        if (bottom < m && in_place == nullptr) {
          ahead = {rows_of(a, bottom, first, least(down, m - bottom), depth), num_blocks};
        } else if (bottom == m && !last) {
          const std::int64_t next = first + depth;
          ahead                   = {columns_of(b, left, next, right - left, least(length, k - next)), num_blocks};
        } else if (bottom == m && right < n) {
          ahead = {columns_of(b, right, 0, least(across, n - right), least(length, k)), num_blocks};
        }
        const std::int64_t stride_of_a = in_place != nullptr ? a.row_stride : depth;
        const auto block               = [&](std::int64_t row, std::int64_t col) __attribute__((always_inline)) {
                        const std::int64_t at = row * stride + col, cols = right - col;
                        const X86Out to{product.c + at,
                          base == nullptr ? nullptr : base + at,
                          stride,
                          last && product.bias != nullptr ? product.bias + col : nullptr,
                          times == nullptr ? nullptr : times + at,
                          cols};
                        const X86Panels* const of_rows = cols >= panel ? table->whole : table->some;
                        of_rows[least(width, bottom - row)](block_of_a + (row - top) * stride_of_a, stride_of_a,
                                              packed.b + (col - left) * depth, depth, to, ahead);
        };
        if (in_place != nullptr) {  // its rows can lie far apart: each comes into the first-level cache once
          for (std::int64_t row = top; row < bottom; row += width) {
            for (std::int64_t col = left; col < right; col += panel) block(row, col);
          }
          if (last && done.call != nullptr) done.call(done.of, top, bottom - top, left, right - left);
          continue;
        }
        for (std::int64_t col = left, done_to = left; col < right; col += panel) {
          for (std::int64_t row = top; row < bottom; row += width) block(row, col);
          const std::int64_t end = least(col + panel, right);
          if (last && done.call != nullptr && (end == right || end - done_to >= done_cols)) {
            done.call(done.of, top, bottom - top, done_to, end - done_to);
            done_to = end;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace stepgraph::cpu
