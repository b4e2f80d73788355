#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/graph/part.hpp"

namespace stepgraph::cuda {

inline constexpr std::size_t max_members = 64;  // per reduction

// Writes the reduction of all of `in`, in order, to each of `out`, as engine/base/arithmetic.hpp defines it, on a
// stream (cudaStream_t). An output may be an input.
void reduce(void* stream, std::span<const std::byte* const> in, std::span<std::byte* const> out, std::int64_t num_bytes,
            DType type, Reduction reduction);

}  // namespace stepgraph::cuda
