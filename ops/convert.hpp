#pragma once
#include <optional>
#include <string>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// to = from in another type, element by element: f32 to bf16 or f16 (to the nearest, ties to even), or one of those to
// f32 (exact).
// Both may be strided, and cut differently. For reductions in another type than that of what is reduced.
struct Convert {
  std::string name             = {};
  std::optional<LaneKind> lane = LaneKind::compute;  // none: only its accesses order it
  Access to                    = {};
  Access from                  = {};
  Labels labels                = {};
};
Node convert(Graph& graph, const Convert& spec);

}  // namespace stepgraph
