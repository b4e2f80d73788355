#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/graph/part.hpp"

namespace stepgraph::cuda {

inline constexpr std::size_t max_members = 64;  // of one reduction

// Each of `out` gets the reduction of all of `in`, in their order, as engine/base/arithmetic.hpp says, on a stream
// (cudaStream_t). An output may be an input.
void reduce(void* stream, std::span<const std::byte* const> in, std::span<std::byte* const> out, std::int64_t num_bytes,
            DType type, Reduction reduction);

}  // namespace stepgraph::cuda
