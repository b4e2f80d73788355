#pragma once
#include <array>
#include <cstdint>
#include <ostream>
#include <string_view>

namespace stepgraph {

// The purpose of a buffer of a step.
//   parameters   weights as ops read them: whole, or the rank's shard
//   gradients    of weights, from the backward pass to the update
//   optimizer    moments and, with bf16 or f16, masters. Masters are sharded as moments are, and ops never read them:
//                they count as optimizer state (ZeRO, arXiv 1910.02054)
//   activations  tensors of a microbatch: forward, backward, recomputed, and received from other stages
//   slots        memory for gathered weights and for unreduced gradients
//   other        tokens, losses, the norm, and work memory of collective algorithms
enum class MemoryRole : std::uint8_t { parameters, gradients, optimizer, activations, slots, other };
inline constexpr std::array all_memory_roles{MemoryRole::parameters,  MemoryRole::gradients, MemoryRole::optimizer,
                                             MemoryRole::activations, MemoryRole::slots,     MemoryRole::other};
[[nodiscard]] std::string_view to_string(MemoryRole role) noexcept;
inline std::ostream& operator<<(std::ostream& out, MemoryRole role) { return out << to_string(role); }

}  // namespace stepgraph
