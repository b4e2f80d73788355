#pragma once
#include <cstdint>

#include "engine/run/device.hpp"
#include "ops/tape/tensor.hpp"

// Matrix products on a device, by cuBLASLt. All matrices are row-major without gaps.
//
// Sums are in the wide type; float products are summed in float unless the queue allows TF32. Algorithms that add
// partial sums in a nondeterministic order are never chosen, so a product has the same bits every time. A large product
// is measured when its sizes, types, layout and alignments are first seen in a process, unless its stream is being
// captured. Of the algorithms whose result, on the actual operands, has the bits of the library's own choice, the
// fastest is used from then on. Timings vary, so the chosen algorithm may vary; its bits do not. Uses workspace:
// product_workspace, and to measure a product that adds in place, product_in_place_workspace. With less than the latter
// such a product is not measured.
namespace stepgraph::cuda {

// [rows, cols]; if `transposed`, stored as [cols, rows].
template <class T>
struct Operand {
  const T* data   = nullptr;
  bool transposed = false;
};

// c = (base +) a b + bias, rounded once.
template <class T, class Sum = T>
struct Product {
  std::int64_t m = 0, n = 0, k = 0;
  Operand<T> a   = {};       // [m, k]
  Operand<T> b   = {};       // [k, n]
  Into<T, Sum> c = {};       // [m, n]
  const T* bias  = nullptr;  // [n], added to every row; null: 0. Not together with a base
};
template <class T, class Sum>
void multiply(const DeviceQueue& queue, const Product<T, Sum>& product);

// c = a b + bias and y = gelu(c) (the tanh form), computed from the sum before it is rounded to c. y may be c; c is
// then not kept. Returns false, with nothing enqueued, if the library has no such kernel; always for float and double,
// for which the library rounds too early. There is no base.
template <class T>
[[nodiscard]] bool multiply_gelu(const DeviceQueue& queue, const Product<T>& product, T* y);

// c = a b times the slope of that gelu at x, [m, n] like c, computed from the sum before rounding. Returns false as
// above. There is neither a base nor a bias.
template <class T>
[[nodiscard]] bool multiply_gelu_gradient(const DeviceQueue& queue, const Product<T>& product, const T* x);

}  // namespace stepgraph::cuda
