#pragma once
#include <cstdint>
#include <span>

#include "engine/run/device.hpp"
#include "ops/tape/tensor.hpp"

namespace stepgraph::cuda {

// As cpu::Rotation has it; `frequencies` are the host's.
struct Rotation {
  std::int64_t seq, row, turned_heads, head_size;
  bool backward;
  std::span<const double> frequencies;  // head_size / 2
};

// out = in, turned; they may be one. Cosines and sines of a stretch of positions at a time are in the workspace: all of
// them, as a rule, which takes head_size wide numbers for each.
template <class T>
void rotate(const DeviceQueue& queue, const Rotation& rotation, std::int64_t rows, const T* in, T* out);

}  // namespace stepgraph::cuda
