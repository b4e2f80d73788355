#pragma once
#include <array>
#include <cstdint>
#include <ostream>
#include <string_view>

namespace stepgraph {

// What a buffer of a step is there for.
//   parameters   weights as ops read them, whole or the share that the rank keeps
//   gradients    of weights, on the way to the update and while they travel
//   optimizer    what the update keeps from step to step: moments, and with bf16 the masters. Those are the
//                optimizer's own copy: ops never read them, and they are shared out as moments are (so counts ZeRO,
//                arXiv 1910.02054)
//   activations  what ops make of a microbatch, forward, backward and again, with what comes from other stages
//   slots        what gathered weights and unreduced gradients pass through
//   other        tokens, losses, the norm, and what collective algorithms need on the way
enum class MemoryRole : std::uint8_t { parameters, gradients, optimizer, activations, slots, other };
inline constexpr std::array all_memory_roles{MemoryRole::parameters,  MemoryRole::gradients, MemoryRole::optimizer,
                                             MemoryRole::activations, MemoryRole::slots,     MemoryRole::other};
[[nodiscard]] std::string_view to_string(MemoryRole role) noexcept;
inline std::ostream& operator<<(std::ostream& out, MemoryRole role) { return out << to_string(role); }

}  // namespace stepgraph
