#pragma once
#include <cstdint>

#include "engine/run/context.hpp"
#include "engine/run/device.hpp"
#include "ops/tape/number.hpp"

// The sums of ops/cpu/exact_squares.hpp on a device: the same limbs, bit for bit.
namespace stepgraph::cuda {

// As cpu::add_squares does for tiles of 32768 elements each: what is added to `sum`, cpu::exact_size of the wide type,
// for one of them has limbs below 2^32.
inline constexpr std::int64_t squares_per_tile = 32768;
template <class T>
void add_squares(const DeviceQueue& queue, const Rows<const T>& values, std::int64_t* sum);

// The end of a sum of squares: op clip_factor's kernel. `scale` and `overflow` are both there or both null.
struct ClipFactorCall {
  const std::int64_t* squares = nullptr;
  const double* scale         = nullptr;
  double clip                 = 0;
  double* norm                = nullptr;
  double* factor              = nullptr;
  std::int64_t* overflow      = nullptr;
};
template <class T>  // float or double: what was squared
void clip_factor(const DeviceQueue& queue, const ClipFactorCall& call);

}  // namespace stepgraph::cuda
