#pragma once
#include <cstdint>
#include <optional>

#include "engine/run/device.hpp"
#include "ops/tape/tensor.hpp"

// Elementwise operations on the residual stream, on a device. Elements are float, double, bf16 or f16.
namespace stepgraph::cuda {

// The dropout of a matrix, by the mask of ops/shared/dropout_mask.hpp; the step number is in device memory. Element
// (row, column) has mask index first + row * width + column.
struct Drop {
  std::uint64_t key;         // of the site
  std::uint32_t dropped;     // threshold: out of 2^32
  double scale;              // of the kept elements
  const std::int64_t* step;  // device memory
  std::int64_t first;
};

// y = x + drop(branch + bias), over rows of `width` elements.
template <class T>
struct ResidualRows {
  std::int64_t rows, width;
  const T* x;
  const T* branch;
  const T* bias;  // null: none
  T* y;
  std::optional<Drop> drop;
};
template <class T>
void residual_forward(const DeviceQueue& queue, const ResidualRows<T>& rows);

// into (+)= drop(from).
template <class T>
void put_dropped(const DeviceQueue& queue, const Drop& drop, const T* from, const Into<T>& into);

// into (+)= from.
template <class T>
void put(const DeviceQueue& queue, const T* from, const Into<T>& into);

}  // namespace stepgraph::cuda
