#pragma once
#include <cstdint>

#include "engine/run/device.hpp"
#include "ops/cuda/layers/residual.hpp"
#include "ops/tape/tensor.hpp"

// Layer norm and RMS norm over rows of `width` elements on a device, as in ops/cpu/norm.hpp. Elements are float,
// double, bf16 or f16; weight and bias have the same type or the wide type.
namespace stepgraph::cuda {

// For an RMS norm, center and bias are null.
template <class T, class Param>
struct Norm {
  std::int64_t rows, width;
  const T* x;
  const Param* weight;
  const Param* bias;
  Wide<T>* center;
  Wide<T>* scale;
  T* y;
  double eps;
};
template <class T, class Param>
void norm_forward(const DeviceQueue& queue, const Norm<T, Param>& norm);

// Sums each row and normalises the stored sum while it is in registers: norm.x is sum.y.
template <class T, class Param>
void residual_norm_forward(const DeviceQueue& queue, const ResidualRows<T>& sum, const Norm<T, Param>& norm);

template <class T, class Param>
struct NormBackward {
  std::int64_t rows, width;
  const T* x;
  const Param* weight;    // null for the weight gradients
  const Wide<T>* center;  // null: RMS norm
  const Wide<T>* scale;
  const T* dy;
};
template <class T, class Param>
void norm_backward(const DeviceQueue& queue, const NormBackward<T, Param>& norm, const Into<T>& dx);

// dw (+)= the sum over rows of dy times the normalised x; with a bias, db (+)= the sum of dy. Uses counters, and
// workspace: norm_weight_workspace.
template <class T, class Param>
void norm_weight_gradient(const DeviceQueue& queue, const NormBackward<T, Param>& norm, const Into<T, Wide<T>>& dw,
                          const Into<T, Wide<T>>* db);

}  // namespace stepgraph::cuda
