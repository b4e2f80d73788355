#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/run/device.hpp"

namespace stepgraph::cuda {

// hash = hash_bytes of ops/transfers/hash.hpp; both arguments are on the device.
void hash_bytes(const DeviceQueue& queue, std::span<const std::byte> bytes, std::int64_t* hash);

}  // namespace stepgraph::cuda
