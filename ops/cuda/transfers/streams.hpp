#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/base/types.hpp"
#include "engine/graph/part.hpp"
#include "engine/run/context.hpp"
#include "engine/run/device.hpp"

// Operations on bytes of any type, on a device.
namespace stepgraph::cuda {

// Writes zeros.
void clear(const DeviceQueue& queue, std::span<std::byte> bytes);

// Concatenated rows, from byte `begin` on.
struct Stretch {
  Rows<std::byte> rows;
  std::int64_t begin = 0;
};

// to = from, `size_bytes` bytes; either side may be pinned host memory.
void copy(const DeviceQueue& queue, const Stretch& to, const Stretch& from, std::int64_t size_bytes);

// As in engine/base/arithmetic.hpp, with the same bits. Rows are whole elements, at any address.
void reduce_into(const DeviceQueue& queue, const Stretch& into, const Stretch& from, std::int64_t size_bytes,
                 DType type, Reduction reduction);
void divide(const DeviceQueue& queue, const Stretch& values, std::int64_t size_bytes, DType type, std::int64_t count);

// to = from in another type, `size` elements: float to bf16 or f16, or bf16 or f16 to float.
template <class To, class From>
void convert(const DeviceQueue& queue, const Rows<To>& to, const Rows<const From>& from, std::int64_t size);

// to = factor * (values[0] + values[1] + ...), added in this order. For a few values. Where `all` is given, the factor
// is divided by all - ignored, and 0 if this is 0.
struct SumScale {
  double factor               = 1;
  std::int64_t all            = 0;  // 0: not divided
  const std::int64_t* ignored = nullptr;
};
void scaled_sum(const DeviceQueue& queue, std::span<const double> values, const SumScale& scale, double* to);

}  // namespace stepgraph::cuda
