#pragma once
#include <cstdint>

#include "ops/cpu/vector.hpp"

// Products of matrices that fit a cache, for kernels that produce and consume them tile by tile. Computed in blocks
// whose sums stay in registers. Each element is one sum over the depth, in order, independent of its neighbours.
namespace stepgraph::cpu {
inline namespace STEPGRAPH_LEVEL {

inline constexpr int block_rows = 8, block_vectors = 2;
template <class T>
inline constexpr int block_cols = block_vectors* lanes_of<T>;

// c = a^T b. Rows of a, b and c are a_row, b_row and c_row elements apart. put(c, row, sum) receives a vector of sums
// for the position c, in row `row` of the block.
template <class T>
struct Product {
  std::int64_t depth;  // rows of a and of b
  const T* a;
  std::int64_t a_row;
  const T* b;
  std::int64_t b_row;
  T* c;
  std::int64_t c_row;
};

namespace detail {
template <class T>
struct Block {
  Vector<T> sums[block_rows][block_vectors] = {};

  // Adds the outer product of number(row), one number per row, and one row of b.
  template <class Number>
  [[gnu::always_inline]] void add(const T* b, const Number& number) {
    Vector<T> of_b[block_vectors];
    for (int v = 0; v < block_vectors; ++v) of_b[v] = load_vector(b + v * lanes_of<T>);
    for (int r = 0; r < block_rows; ++r) {
      for (int v = 0; v < block_vectors; ++v) sums[r][v] += number(r) * of_b[v];
    }
  }
  template <class Put>
  [[gnu::always_inline]] void put_into(T* c, std::int64_t c_row, const Put& put) const {
    for (int r = 0; r < block_rows; ++r) {
      for (int v = 0; v < block_vectors; ++v) put(c + r * c_row + v * lanes_of<T>, r, sums[r][v]);
    }
  }
};
}  // namespace detail

// One block of rows of the product. `cols` is a multiple of block_cols.
template <class T, class Put>
[[gnu::always_inline]] inline void multiply_block(const Product<T>& p, std::int64_t cols, const Put& put) {
  constexpr int lanes = lanes_of<T>;
  for (std::int64_t col = 0; col < cols; col += block_cols<T>) {
    detail::Block<T> block;
    const T *a = p.a, *b = p.b + col;
    for (std::int64_t k = 0; k < p.depth; ++k, a += p.a_row, b += p.b_row) {
      // A number taken from a vector at a constant index can be an operand of the multiplication.
      if constexpr (block_rows % lanes == 0) {
        Vector<T> of_a[block_rows / lanes];
        for (int v = 0; v < block_rows / lanes; ++v) of_a[v] = load_vector(a + v * lanes);
        block.add(b, [&of_a](int r) { return of_a[r / lanes][r % lanes]; });
      } else {
        block.add(b, [a](int r) { return a[r]; });
      }
    }
    block.put_into(p.c + col, p.c_row, put);
  }
}

}  // namespace STEPGRAPH_LEVEL
}  // namespace stepgraph::cpu
