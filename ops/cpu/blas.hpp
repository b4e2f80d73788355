#pragma once
#include <cstdint>
#include <string_view>

#include "ops/cpu/gemm.hpp"

// The CBLAS that was found at configure time (STEPGRAPH_BLAS), a serial one: threads are the executor's business.
namespace stepgraph::cpu {

// c = a b, or c += a b. Neither m, n nor k is 0.
template <class T>
struct BlasProduct {
  std::int64_t m = 0, n = 0, k = 0;
  Matrix<T> a           = {};  // [m, k]
  Matrix<T> b           = {};  // [k, n]
  T* c                  = nullptr;
  std::int64_t c_stride = 0;
  bool adds             = false;
};

[[nodiscard]] std::string_view blas_library();  // "blis", "openblas"; empty: there is none

// False, with nothing done, where there is none or its interface cannot say this: an operand with no stride of 1, or a
// size beyond its integers.
[[nodiscard]] bool blas_multiply(const BlasProduct<float>& product);
[[nodiscard]] bool blas_multiply(const BlasProduct<double>& product);

}  // namespace stepgraph::cpu
