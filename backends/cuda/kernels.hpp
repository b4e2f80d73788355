#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/graph/part.hpp"

// The kernels of communications on a device. All work is enqueued on `stream`, a cudaStream_t.
namespace stepgraph::cuda {

inline constexpr std::size_t max_members       = 64;  // per reduction
inline constexpr std::size_t max_element_bytes = 8;

// Writes the reduction of all of `in`, in order, to each of `out`, as engine/base/arithmetic.hpp defines it. Addresses
// need not be aligned. An output may be an input. `num_bytes` are whole elements.
void reduce(void* stream, std::span<const std::byte* const> in, std::span<std::byte* const> out, std::int64_t num_bytes,
            DType type, Reduction reduction);

// The same for one element whose bytes do not lie together: the address of each.
using SplitElement = std::array<std::byte*, max_element_bytes>;
void reduce(void* stream, std::span<const SplitElement> in, std::span<const SplitElement> out, DType type,
            Reduction reduction);

// to_a = from_b and to_b = from_a, `num_bytes` bytes. from_a may be to_a, and from_b may be to_b.
void exchange(void* stream, const std::byte* from_a, std::byte* to_a, const std::byte* from_b, std::byte* to_b,
              std::int64_t num_bytes);

}  // namespace stepgraph::cuda
