#pragma once
#include <cstdint>
#include <ostream>
#include <string_view>

namespace stepgraph {

// Activation checkpointing: which activations the backward pass recomputes instead of keeping them from the forward
// pass.
//   none       nothing is recomputed
//   selective  attention is recomputed: its output and its row sums are not kept, its input is
//   full       every layer is recomputed from its input, the only activation of the layer that is kept
enum class Recompute : std::uint8_t { none, selective, full };
[[nodiscard]] std::string_view to_string(Recompute kind) noexcept;
inline std::ostream& operator<<(std::ostream& out, Recompute kind) { return out << to_string(kind); }

}  // namespace stepgraph
