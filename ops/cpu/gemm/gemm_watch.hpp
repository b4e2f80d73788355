#pragma once
#include <cstdint>

#include "engine/base/watched.hpp"
#include "ops/cpu/gemm/gemm.hpp"
#include "ops/cpu/gemm/gemm_cut.hpp"

namespace stepgraph::cpu {

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

// The same for a range of the product: files of kernels are compiled without ThreadSanitizer, and a BLAS always is.
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

}  // namespace stepgraph::cpu
