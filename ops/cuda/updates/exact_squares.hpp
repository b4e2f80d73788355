#pragma once
#include <cstdint>

#include "engine/run/context.hpp"
#include "engine/run/device.hpp"
#include "ops/tape/number.hpp"

// The exact sums of ops/cpu/exact_squares.hpp on a device, with the same limbs, bit for bit.
namespace stepgraph::cuda {

// The same as cpu::add_squares on tiles of 32768 elements: the limbs that a tile adds to `sum` are below 2^32. `sum`
// has cpu::exact_size elements of the wide type. Devices with clusters of blocks use them, unless `clusters` is false.
inline constexpr std::int64_t squares_per_tile = 32768;
template <class T>
void add_squares(const DeviceQueue& queue, const Rows<const T>& values, std::int64_t* sum, bool clusters = true);

// The kernel of op clip_factor. `scale` and `overflow` are both set or both null.
struct ClipFactorCall {
  const std::int64_t* squares = nullptr;
  const double* scale         = nullptr;
  double clip                 = 0;
  double* norm                = nullptr;
  double* factor              = nullptr;
  std::int64_t* overflow      = nullptr;
};
template <class T>  // float or double: the type of the squared elements
void clip_factor(const DeviceQueue& queue, const ClipFactorCall& call);

}  // namespace stepgraph::cuda
