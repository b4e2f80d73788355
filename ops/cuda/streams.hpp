#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/base/types.hpp"
#include "engine/graph/part.hpp"
#include "engine/run/context.hpp"
#include "engine/run/device.hpp"

// What is done to bytes on a device, whatever they are.
namespace stepgraph::cuda {

// Zeros.
void clear(const DeviceQueue& queue, std::span<std::byte> bytes);

// Rows laid end to end, from byte `begin` of them on.
struct Stretch {
  Rows<std::byte> rows;
  std::int64_t begin = 0;
};

// to = from, `size_bytes` of both; either may be pinned memory of the host.
void copy(const DeviceQueue& queue, const Stretch& to, const Stretch& from, std::int64_t size_bytes);

// As engine/base/arithmetic.hpp has them, with its bits; but elements are where elements of their type may be.
void reduce_into(const DeviceQueue& queue, const Stretch& into, const Stretch& from, std::int64_t size_bytes,
                 DType type, Reduction reduction);
void divide(const DeviceQueue& queue, const Stretch& values, std::int64_t size_bytes, DType type, std::int64_t count);

// to = from in another type, `size` elements of both: float to bf16 or f16, or one of those to float.
template <class To, class From>
void convert(const DeviceQueue& queue, const Rows<To>& to, const Rows<const From>& from, std::int64_t size);

// to = factor * (values[0] + values[1] + ...), added in this order: for a few.
void scaled_sum(const DeviceQueue& queue, std::span<const double> values, double factor, double* to);

}  // namespace stepgraph::cuda
