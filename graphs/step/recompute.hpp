#pragma once
#include <cstdint>
#include <ostream>
#include <string_view>

#include "engine/graph/graph.hpp"
#include "engine/graph/recompute.hpp"

namespace stepgraph {

// What backward computes again instead of keeping it from the forward pass.
//   none       nothing
//   selective  attention: its output and its row sums are not kept; what it reads is
//   full       each layer from its input, which is all that is kept of it
enum class Recompute : std::uint8_t { none, selective, full };
[[nodiscard]] std::string_view to_string(Recompute kind) noexcept;
inline std::ostream& operator<<(std::ostream& out, Recompute kind) { return out << to_string(kind); }

// The pass of engine/graph/recompute.hpp with the regions of a training step, which labels tell: of one microbatch and
// one layer, the nodes of phase "forward" (full), or of those the ones with op "attention" (selective). Readers are the
// nodes of other phases with equal microbatch and layer; for selective, the ones that read what the region wrote.
[[nodiscard]] Graph recompute(const Graph& graph, Recompute kind);

}  // namespace stepgraph
