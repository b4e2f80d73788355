#pragma once
#include <cstdint>
#include <type_traits>

#include "ops/cpu/vector.hpp"
#if defined(STEPGRAPH_NEON)
#include "ops/cpu/gemm/arm/small_product.hpp"
#endif

// Products of matrices that fit a cache, for kernels that produce and consume them tile by tile. Computed in blocks
// whose sums stay in registers. Each element is one sum over the depth, in order, independent of its neighbours.
namespace stepgraph::cpu {
inline namespace STEPGRAPH_LEVEL {

// Blocks have block_rows rows, or fewer at the end: the sums and one row of b fit the registers. There are 32 of them
// on Arm and in AVX-512, otherwise 16. On Arm a lane of a vector can be an operand of a multiplication, so numbers of a
// are loaded as vectors.
#if defined(STEPGRAPH_NEON)
inline constexpr bool by_lane   = true;
inline constexpr int block_rows = 8;
#else
inline constexpr bool by_lane   = false;
inline constexpr int block_rows = vector_bytes == 64 ? 12 : 6;
#endif
inline constexpr int last_rows     = 4;  // rows of a product are a multiple of it
inline constexpr int block_vectors = 2;
template <class T>
inline constexpr int block_cols = block_vectors* lanes_of<T>;

// How the left operand is stored: element (r, k) is a[r * a_row + k] or a[k * a_row + r].
enum class Left : std::uint8_t { rows, columns };

// c = a b. Rows of b and c are b_row and c_row elements apart. Columns of b are stored in panels of block_cols, which
// are b_panel elements apart: block_cols if rows are contiguous.
template <class T>
struct Product {
  const T* a;
  std::int64_t a_row;
  const T* b;
  std::int64_t b_row;
  std::int64_t b_panel;
  T* c;
  std::int64_t c_row;
};

// Steps of the depth that a block needs. If `a` is stored in rows, both are multiples of 4.
struct Steps {
  std::int64_t first, end;
};

namespace detail {
template <Left stored, class T, int rows>
struct Block {
  Vector<T> sums[rows][block_vectors] = {};

  // Adds the outer product of number(row), one number per row, and one row of b.
  template <class Number>
  [[gnu::always_inline]] void add(const T* b, const Number& number) {
    Vector<T> of_b[block_vectors];
    for (int v = 0; v < block_vectors; ++v) of_b[v] = load_vector(b + v * lanes_of<T>);
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      const auto of_a = number(r);
      for (int v = 0; v < block_vectors; ++v) sums[r][v] += of_a * of_b[v];
    }
  }
  // `a` starts at the first row and step, `b` at the first step.
  [[gnu::always_inline]] void add_steps(const T* a, std::int64_t a_row, const T* b, std::int64_t b_row,
                                        std::int64_t depth) {
    constexpr int lanes = lanes_of<T>;
#if defined(STEPGRAPH_NEON)
    if constexpr (std::is_same_v<T, float> && rows == 8) {
      if constexpr (stored == Left::rows) return sum_rows(a, a_row, b, b_row, depth, sums);
      return sum_columns(a, a_row, b, b_row, depth, sums);
    }
#endif
    if constexpr (by_lane && stored == Left::columns) {
      for (std::int64_t k = 0; k < depth; ++k, a += a_row, b += b_row) {
        Vector<T> of_a[rows / lanes];
        for (int i = 0; i < rows / lanes; ++i) of_a[i] = load_vector(a + i * lanes);
        add(b, [&of_a](int r) { return of_a[r / lanes][r % lanes]; });
      }
    } else if constexpr (by_lane) {
      for (std::int64_t k = 0; k < depth; k += lanes, a += lanes) {
        Vector<T> of_a[rows];
        for (int r = 0; r < rows; ++r) of_a[r] = load_vector(a + r * a_row);
#pragma GCC unroll 4
        for (int step = 0; step < lanes; ++step, b += b_row) add(b, [&](int r) { return of_a[r][step]; });
      }
    } else if constexpr (stored == Left::columns) {
#pragma GCC unroll 2
      for (std::int64_t k = 0; k < depth; ++k, a += a_row, b += b_row) add(b, [a](int r) { return a[r]; });
    } else {
      // An address is a pointer plus one or two times a_row, so a few pointers suffice.
      const T* at[(rows + 2) / 3];
      for (int i = 0; i < (rows + 2) / 3; ++i) at[i] = a + 3 * i * a_row;
      for (std::int64_t k = 0; k < depth; k += 4) {
#pragma GCC unroll 4
        for (int step = 0; step < 4; ++step, b += b_row) add(b, [&](int r) { return at[r / 3][r % 3 * a_row + step]; });
        for (auto& each : at) each += 4;
      }
    }
  }
};

template <Left stored, int rows, class T, class StepsOf, class Put>
[[gnu::noinline]] void multiply_block(const Product<T>& p, std::int64_t row, std::int64_t col, const StepsOf& steps_of,
                                      const Put& put) {
  const Steps steps = steps_of(row, rows, col);
  if (steps.first >= steps.end) return;
  const std::int64_t c_row = p.c_row;  // a copy: the compiler cannot exclude that stores modify `p`
  Block<stored, T, rows> block;
  const T* const a = p.a + (stored == Left::rows ? row * p.a_row + steps.first : steps.first * p.a_row + row);
  block.add_steps(a, p.a_row, p.b + col / block_cols<T> * p.b_panel + steps.first * p.b_row, p.b_row,
                  steps.end - steps.first);
  T* to = p.c + row * c_row + col;
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r, to += c_row) {
    for (int v = 0; v < block_vectors; ++v) put(to + v * lanes_of<T>, row + r, col + v * lanes_of<T>, block.sums[r][v]);
  }
}
}  // namespace detail

// steps_of(row, rows, col) returns the steps of the block that starts at (row, col); without steps, the block is left
// out. put(c, row, col, sum) receives a vector of sums for the position c. `rows` is a multiple of last_rows, `cols` of
// block_cols. A panel of b stays in the first-level cache.
template <Left stored, class T, class StepsOf, class Put>
void multiply(const Product<T>& product, std::int64_t rows, std::int64_t cols, const StepsOf& steps_of,
              const Put& put) {
  // The last 16 or 8 rows are two equal blocks where a whole block would leave 4 or 2 of them.
  constexpr std::int64_t halved = block_rows == 6 ? 8 : 16;
  for (std::int64_t col = 0; col < cols; col += block_cols<T>) {
    for (std::int64_t row = 0; row < rows;) {
      const std::int64_t left = rows - row;
      if (left >= block_rows && left != halved) {
        detail::multiply_block<stored, block_rows>(product, row, col, steps_of, put);
        row += block_rows;
      } else if (block_rows >= 8 && left >= 8) {
        detail::multiply_block<stored, 8>(product, row, col, steps_of, put);
        row += 8;
      } else {
        detail::multiply_block<stored, last_rows>(product, row, col, steps_of, put);
        row += last_rows;
      }
    }
  }
}

}  // namespace STEPGRAPH_LEVEL
}  // namespace stepgraph::cpu
