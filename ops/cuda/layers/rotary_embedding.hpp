#pragma once
#include <cstdint>
#include <span>

#include "engine/run/device.hpp"
#include "ops/tape/tensor.hpp"

namespace stepgraph::cuda {

// Like cpu::Rotation; `frequencies` is in host memory.
struct Rotation {
  std::int64_t seq, row, turned_heads, head_size;
  bool backward;
  std::span<const double> frequencies;  // head_size / 2
};

// out = rotated in; both may be the same. The workspace holds the cosines and sines of a range of positions at a time,
// usually of all: rotary_workspace.
template <class T>
void rotate(const DeviceQueue& queue, const Rotation& rotation, std::int64_t rows, const T* in, T* out);

}  // namespace stepgraph::cuda
