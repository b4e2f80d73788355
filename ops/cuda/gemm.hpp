#pragma once
#include <cstdint>

#include "engine/run/device.hpp"
#include "ops/tape/tensor.hpp"

// Matrix products on a device, by cuBLASLt. All matrices lie row by row without gaps.
//
// Sums are in the wide type: float's are float's own, unless the queue allows TF32. None of the library's algorithms
// that add up parts of a sum in an order of their own is ever chosen, so that a product has the same bits each time. A
// large one is measured where its stream is not being captured, when its sizes, types, layout and alignments are seen
// for the first time in a process: of the algorithms that have the bits of the library's own choice, on the operands
// that are there, the fastest is used from then on. Times are not the same twice, and neither is that algorithm; its
// bits are.
namespace stepgraph::cuda {

// [rows, cols], or where `transposed` lying as [cols, rows].
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
  const T* bias  = nullptr;  // [n], for every row; none: 0. Not beside a base
};
template <class T, class Sum>
void multiply(const DeviceQueue& queue, const Product<T, Sum>& product);

// c = a b + bias and y = gelu(c), of the form with a tanh, from the sum before it is rounded to c; y may be c, which
// then is not kept. False where the library has none for that (never for float and double: what it has rounds too
// early for them): then nothing was enqueued. There is no base.
template <class T>
[[nodiscard]] bool multiply_gelu(const DeviceQueue& queue, const Product<T>& product, T* y);

// c = a b times the slope of that gelu at x, [m, n] as c, from the sum before it is rounded. False as above. There is
// neither a base nor a bias.
template <class T>
[[nodiscard]] bool multiply_gelu_gradient(const DeviceQueue& queue, const Product<T>& product, const T* x);

}  // namespace stepgraph::cuda
