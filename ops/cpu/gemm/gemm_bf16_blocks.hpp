#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ops/cpu/bf16_lanes.hpp"
#include "ops/cpu/gemm/gemm_bf16.hpp"
#include "ops/cpu/gemm/gemm_bf16_pack.hpp"

// The loops of the bf16 products around a kernel that multiplies two packed panels. The left operand is packed in
// blocks that stay in the second-level cache, the right one in a few panels, one of which stays in the first-level
// cache. Everything is in an anonymous namespace, because each file that includes this header compiles it for other
// instructions.
//
// A Kernel has these constants: `rows` by `cols`, the size of a block that it multiplies at a time; `a_group` and
// `b_group`, the steps of k that are together in a packed lane; `step`, of which the depth is a multiple; the largest
// `max_rows`, `max_cols` and `max_depth` of a block; `at_once`, the columns packed at a time; `bytes`, the length of
// its vectors. And these functions:
// - multiply(a, b, depth, rows, block): the first `rows` rows (or more) of a block of sums, row by row.
// - begin() and end(), before and after a product.
namespace stepgraph::cpu {
namespace {

// --- the end of a block ----------------------------------------------------------------------------------------------

// Where a block of sums goes: to = base + ((before + sums) + bias), times `times`.
template <class To>
struct BlockEnd {
  To* to;
  const float* before;
  const To* base;
  std::int64_t stride, before_stride;  // of to, base and times; of before
  const bf16* bias;
  const bf16* times;
};

// One row of `cols` columns, a multiple of `lanes`.
template <int cols, int lanes, class To>
[[gnu::always_inline]] inline void end_row(const float* sums, To* to, const float* before, const To* base,
                                           const bf16* bias, const bf16* times) {
  using L = Bf16Lanes<lanes>;
#pragma GCC unroll 4
  for (int j = 0; j < cols; j += lanes) {
    typename L::Floats value = L::get(sums + j);
    if (before != nullptr) value = L::get(before + j) + value;
    if (bias != nullptr) value = value + L::get(bias + j);
    if (base != nullptr) value = L::get(base + j) + value;
    if (times != nullptr) value = L::stored(value, To{}) * L::get(times + j);
    L::set(to + j, value);
  }
}

template <class T>
void copy_row(T* to, const T* from, std::int64_t count) {
  std::memcpy(static_cast<void*>(to), from, static_cast<std::size_t>(count) * sizeof(T));
}

template <class Kernel, class To>
void end_block(const float* sums, const BlockEnd<To>& end, std::int64_t rows, std::int64_t cols) {
  constexpr int width = Kernel::cols, lanes = Kernel::bytes / 4;
  const auto [to, before, base, stride, before_stride, bias, times] = end;
  const auto row_of = []<class T>(const T* from, std::int64_t at) { return from == nullptr ? nullptr : from + at; };
  if (cols == width) {
    for (std::int64_t i = 0; i < rows; ++i)
      end_row<width, lanes>(sums + i * width, to + i * stride, row_of(before, i * before_stride),
                            row_of(base, i * stride), bias, row_of(times, i * stride));
    return;
  }
  // The columns that exist, in rows of the whole width: each element gets the same operations.
  float befores[width] = {};
  To bases[width]      = {}, results[width];
  bf16 biases[width] = {}, factors[width] = {};
  if (bias != nullptr) copy_row(biases, bias, cols);
  for (std::int64_t i = 0; i < rows; ++i) {
    if (before != nullptr) copy_row(befores, before + i * before_stride, cols);
    if (base != nullptr) copy_row(bases, base + i * stride, cols);
    if (times != nullptr) copy_row(factors, times + i * stride, cols);
    end_row<width, lanes>(sums + i * width, results, before == nullptr ? nullptr : befores,
                          base == nullptr ? nullptr : bases, bias == nullptr ? nullptr : biases,
                          times == nullptr ? nullptr : factors);
    copy_row(to + i * stride, results, cols);
  }
}

// --- the product -----------------------------------------------------------------------------------------------------

// A block of rows, columns and k. `padded` is `depth` rounded up to a multiple of the kernel's step.
struct Bf16Step {
  std::int64_t row, rows, col, cols, first, depth, padded;
};

// Panels of columns [col, col + cols) of the step, packed in room.b, times all its rows.
template <class Kernel, class Out>
void multiply_columns(Bf16Room& room, const Bf16Product<Out>& product, const Bf16Step& step, std::int64_t col,
                      std::int64_t cols) {
  constexpr bool wide     = std::is_same_v<Out, float>;
  const bool last         = step.first + step.depth == product.k;
  const std::int64_t sums = Kernel::max_cols;  // the stride of the sums
  for (std::int64_t j = 0; j < cols; j += Kernel::cols) {
    const std::uint16_t* const right = room.b + j * step.padded;
    const std::int64_t used          = smaller(Kernel::cols, cols - j);
    for (std::int64_t i = 0; i < step.rows; i += Kernel::rows) {
      const std::int64_t rows = smaller(Kernel::rows, step.rows - i);
      Kernel::multiply(room.a + i * step.padded, right, step.padded, rows, room.block);
      const std::int64_t at = (step.row + i) * product.c_stride + col + j;
      float* const before   = room.sums + i * sums + (col - step.col) + j;
      const auto from       = [at](auto* of) { return of == nullptr ? nullptr : of + at; };
      if constexpr (wide) {
        end_block<Kernel, float>(
            room.block,
            {product.c + at, from(step.first == 0 ? product.base : product.c), nullptr, product.c_stride,
             product.c_stride, last && product.bias != nullptr ? product.bias + col + j : nullptr,
             last ? from(product.times) : nullptr},
            rows, used);
      } else if (last) {
        end_block<Kernel, bf16>(
            room.block,
            {product.c + at, step.first == 0 ? nullptr : before, from(product.base), product.c_stride, sums,
             product.bias == nullptr ? nullptr : product.bias + col + j, from(product.times)},
            rows, used);
      } else {
        end_block<Kernel, float>(room.block,
                                 {before, step.first == 0 ? nullptr : before, nullptr, sums, sums, nullptr, nullptr},
                                 rows, used);
      }
    }
  }
}

template <class Kernel, class Out>
void multiply_bf16(Bf16Room& room, const Bf16Product<Out>& product, const PartDone& done) {
  constexpr std::int64_t depths = Kernel::max_depth;
  static_assert(Kernel::max_rows * depths <= Bf16Room::a_size && Kernel::at_once * depths <= Bf16Room::b_size);
  static_assert(Kernel::max_rows * Kernel::max_cols <= Bf16Room::sums_size && Kernel::max_rows % Kernel::rows == 0);
  static_assert(Kernel::at_once % Kernel::cols == 0 && Kernel::max_cols % Kernel::at_once == 0);
  static_assert(Kernel::rows * Kernel::cols <= Bf16Room::block_size && depths % Kernel::step == 0);
  const Matrix<bf16>&a = product.a, &b = product.b;
  const std::int64_t blocks = (product.k + depths - 1) / depths;
  const std::int64_t length = rounded_up((product.k + blocks - 1) / blocks, Kernel::step);
  Kernel::begin();
  for (std::int64_t row = 0; row < product.m; row += Kernel::max_rows) {
    for (std::int64_t col = 0; col < product.n; col += Kernel::max_cols) {
      for (std::int64_t first = 0; first < product.k; first += length) {
        const std::int64_t depth = smaller(length, product.k - first);
        const Bf16Step step{row,
                            smaller(Kernel::max_rows, product.m - row),
                            col,
                            smaller(Kernel::max_cols, product.n - col),
                            first,
                            depth,
                            rounded_up(depth, Kernel::step)};
        pack_panels<Kernel::a_group, Kernel::rows, Kernel::bytes>(a.data + row * a.row_stride + first * a.col_stride,
                                                                  a.row_stride, a.col_stride, step.rows, depth,
                                                                  step.padded, room.a);
        for (std::int64_t begin = col; begin < col + step.cols; begin += Kernel::at_once) {
          const std::int64_t cols = smaller(Kernel::at_once, col + step.cols - begin);
          pack_panels<Kernel::b_group, Kernel::cols, Kernel::bytes>(
              b.data + first * b.row_stride + begin * b.col_stride, b.col_stride, b.row_stride, cols, depth,
              step.padded, room.b);
          multiply_columns<Kernel>(room, product, step, begin, cols);
          if (first + depth == product.k && done.call != nullptr) done.call(done.of, row, step.rows, begin, cols);
        }
      }
    }
  }
  Kernel::end();
}

}  // namespace
}  // namespace stepgraph::cpu
