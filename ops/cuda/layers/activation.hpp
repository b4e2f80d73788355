#pragma once
#include <cstdint>

#include "engine/run/device.hpp"
#include "ops/tape/tensor.hpp"

// CUDA kernels for the activations of ops/cpu/activation.hpp. Elements are float, double, bf16 or f16.
namespace stepgraph::cuda {

enum class Curve : std::uint8_t { gelu_tanh, gelu_exact, silu };

// y = curve(x); x and y may be the same.
template <class T>
void activate(const DeviceQueue& queue, Curve curve, const T* x, T* y, std::int64_t size);

// dx (+)= dy * curve'(x); dy may be dx.out.
template <class T>
void activation_gradient(const DeviceQueue& queue, Curve curve, const T* x, const T* dy, const Into<T>& dx);

// y = silu(gate) * up for rows of [gate | up], `width` elements each, and the gradient of such rows.
template <class T>
void swiglu(const DeviceQueue& queue, const T* gate_up, T* y, std::int64_t rows, std::int64_t width);
template <class T>
void swiglu_gradient(const DeviceQueue& queue, const T* gate_up, const T* dy, const Into<T>& dx, std::int64_t rows,
                     std::int64_t width);

}  // namespace stepgraph::cuda
