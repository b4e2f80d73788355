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
//   automatic  ("auto") each layer's activations are kept, recomputed or, where OffloadPlan lets activations move,
//              offloaded: so that the step fits its device at the least simulated time
enum class Recompute : std::uint8_t { none, selective, full, automatic };
[[nodiscard]] std::string_view to_string(Recompute kind) noexcept;
inline std::ostream& operator<<(std::ostream& out, Recompute kind) { return out << to_string(kind); }

}  // namespace stepgraph
