#pragma once
#include <cstddef>
#include <cstdint>

#include "engine/run/device.hpp"
#include "ops/transfers/compress.hpp"

// Kernels of ops/transfers/compress.hpp on a device, with the bits of those for CPUs. Not for none and lossless.
namespace stepgraph::cuda {

void compress_elements(const DeviceQueue& queue, Compression kind, DType type, const std::byte* raw, std::byte* packed,
                       std::int64_t count);
void decompress_elements(const DeviceQueue& queue, Compression kind, DType type, std::byte* raw,
                         const std::byte* packed, std::int64_t count);

}  // namespace stepgraph::cuda
