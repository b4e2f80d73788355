#pragma once
#include <cstdint>
#include <cstring>

// Products of matrices that fit a cache, for kernels that make and use them piece by piece. Each element is one sum
// over the depth in its order, whatever rows and columns are computed beside it.
namespace stepgraph::cpu {

namespace detail {
template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(16)));  // NOLINT: an alias would lose it
};
}  // namespace detail
template <class T>
using Vector = typename detail::VectorOf<T>::type;
template <class T>
inline constexpr int elements_per_vector = 16 / sizeof(T);
// What one tile of a product has: its sums stay in registers.
inline constexpr int tile_rows = 4, tile_vectors = 4;
template <class T>
inline constexpr int tile_cols = tile_vectors* elements_per_vector<T>;

template <class T>
inline Vector<T> load_vector(const T* from) {
  Vector<T> made;
  std::memcpy(&made, from, sizeof made);
  return made;
}
template <class T>
inline void store_vector(T* to, Vector<T> values) {
  std::memcpy(to, &values, sizeof values);
}

// c = a b, or c += a b: a is any matrix, transposed ones too; rows of b and c are contiguous.
template <class T>
struct Product {
  std::int64_t depth;
  const T* a;
  std::int64_t a_row, a_col;  // elements from one row, or column, to the next
  const T* b;
  std::int64_t b_row;
  T* c;
  std::int64_t c_row;
  bool add;
};

template <int rows, int vectors, class T>
inline void product_tile(const Product<T>& p, std::int64_t row, std::int64_t col) {
  constexpr int lanes = elements_per_vector<T>;
  const T *a = p.a + row * p.a_row, *b = p.b + col;
  T* c = p.c + row * p.c_row + col;
  Vector<T> sums[rows][vectors];
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) sums[r][v] = p.add ? load_vector(c + r * p.c_row + v * lanes) : Vector<T>{};
  }
  for (std::int64_t k = 0; k < p.depth; ++k) {
    Vector<T> of_b[vectors];
    for (int v = 0; v < vectors; ++v) of_b[v] = load_vector(b + k * p.b_row + v * lanes);
    for (int r = 0; r < rows; ++r) {
      const T of_a = a[r * p.a_row + k * p.a_col];
      for (int v = 0; v < vectors; ++v) sums[r][v] += of_a * of_b[v];
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) store_vector(c + r * p.c_row + v * lanes, sums[r][v]);
  }
}

template <int rows, class T>
inline void product_column(const Product<T>& p, std::int64_t row, std::int64_t col) {
  for (int r = 0; r < rows; ++r) {
    const T* a = p.a + (row + r) * p.a_row;
    T* c       = p.c + (row + r) * p.c_row + col;
    T sum      = p.add ? *c : T(0);
    for (std::int64_t k = 0; k < p.depth; ++k) sum += a[k * p.a_col] * p.b[k * p.b_row + col];
    *c = sum;
  }
}

// Rows [row, row + rows) of the product, of all `cols` columns.
template <int rows, class T>
inline void product_rows(const Product<T>& p, std::int64_t row, std::int64_t cols) {
  std::int64_t col = 0;
  for (; col + tile_cols<T> <= cols; col += tile_cols<T>) product_tile<rows, tile_vectors>(p, row, col);
  for (; col + elements_per_vector<T> <= cols; col += elements_per_vector<T>) product_tile<rows, 1>(p, row, col);
  for (; col < cols; ++col) product_column<rows>(p, row, col);
}

// The whole product, for up to tile_rows rows.
template <class T>
inline void multiply(const Product<T>& p, std::int64_t rows, std::int64_t cols) {
  if (rows == tile_rows) {
    product_rows<tile_rows>(p, 0, cols);
    return;
  }
  for (std::int64_t row = 0; row < rows; ++row) product_rows<1>(p, row, cols);
}

}  // namespace stepgraph::cpu
