#pragma once
#include <cstdint>
#include <vector>

#include "ops/cpu/matrix.hpp"

// Operands of the products that are checked.
namespace stepgraph::testing::x86 {

struct Shape {
  std::int64_t m, n, k;
};
enum class Stored { rows, columns, apart };  // apart: neither stride is 1

template <class T>
Matrix<T> matrix(const std::vector<T>& of, std::int64_t rows, std::int64_t cols, Stored stored) {
  if (stored == Stored::columns) return {of.data(), 1, rows};
  if (stored == Stored::apart) return {of.data(), 2 * cols, 2};
  return {of.data(), cols, 1};
}

}  // namespace stepgraph::testing::x86
