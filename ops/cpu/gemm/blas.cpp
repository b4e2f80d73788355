#include "ops/cpu/gemm/blas.hpp"

#ifdef STEPGRAPH_CBLAS  // the name of the CBLAS, if there is one
#include <cblas.h>

#include <algorithm>
#include <limits>
#include <optional>
#endif

namespace stepgraph::cpu {

#ifdef STEPGRAPH_CBLAS

namespace {

// An operand in CBLAS terms: row-major, or transposed row-major.
struct Stored {
  CBLAS_TRANSPOSE transpose;
  int stride;
};

template <class T>
std::optional<Stored> stored(const Matrix<T>& of, std::int64_t rows, std::int64_t cols) {
  constexpr std::int64_t most = std::numeric_limits<int>::max();
  if (rows > most || cols > most || of.row_stride > most || of.col_stride > most) return std::nullopt;
  if (of.col_stride == 1 && of.row_stride >= cols) return Stored{CblasNoTrans, static_cast<int>(of.row_stride)};
  if (of.row_stride == 1 && of.col_stride >= rows) return Stored{CblasTrans, static_cast<int>(of.col_stride)};
  return std::nullopt;
}

template <class T, class Function>
bool multiply(const BlasProduct<T>& p, Function* function) {
  const auto a = stored(p.a, p.m, p.k), b = stored(p.b, p.k, p.n), c = stored<T>({p.c, p.c_stride, 1}, p.m, p.n);
  if (!a || !b || !c || c->transpose != CblasNoTrans) return false;
  function(CblasRowMajor, a->transpose, b->transpose, static_cast<int>(p.m), static_cast<int>(p.n),
           static_cast<int>(p.k), T{1}, p.a.data, a->stride, p.b.data, b->stride, p.adds ? T{1} : T{0}, p.c, c->stride);
  return true;
}

}  // namespace

std::string_view blas_library() { return STEPGRAPH_CBLAS; }
bool blas_multiply(const BlasProduct<float>& product) { return multiply(product, cblas_sgemm); }
bool blas_multiply(const BlasProduct<double>& product) { return multiply(product, cblas_dgemm); }

#else

std::string_view blas_library() { return {}; }
bool blas_multiply(const BlasProduct<float>&) { return false; }
bool blas_multiply(const BlasProduct<double>&) { return false; }

#endif

}  // namespace stepgraph::cpu
