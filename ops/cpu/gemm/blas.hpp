#pragma once
#include <cstdint>
#include <string_view>

#include "ops/cpu/gemm/gemm.hpp"

// The CBLAS found at configure time (STEPGRAPH_BLAS). It must be serial: the executor owns the threads.
namespace stepgraph::cpu {

// c = a b, or c += a b. m, n and k are not 0.
template <class T>
struct BlasProduct {
  std::int64_t m = 0, n = 0, k = 0;
  Matrix<T> a           = {};  // [m, k]
  Matrix<T> b           = {};  // [k, n]
  T* c                  = nullptr;
  std::int64_t c_stride = 0;
  bool adds             = false;
};

[[nodiscard]] std::string_view blas_library();  // "blis", "openblas"; empty: no CBLAS

// Returns false and does nothing if there is no CBLAS or its interface cannot express the product: an operand without a
// unit stride, or a size beyond its integer type.
[[nodiscard]] bool blas_multiply(const BlasProduct<float>& product);
[[nodiscard]] bool blas_multiply(const BlasProduct<double>& product);

}  // namespace stepgraph::cpu
