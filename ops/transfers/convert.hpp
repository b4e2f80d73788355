#pragma once
#include <optional>
#include <string>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// Converts `from` to the type of `to`, element by element: f32 to bf16 or f16 (round to nearest, ties to even), or bf16
// or f16 to f32 (exact). Both accesses may be strided and cut differently. For reductions in another type than that of
// the data.
struct Convert {
  std::string name             = {};
  std::optional<LaneKind> lane = LaneKind::compute;  // none: only its accesses order the node
  Access to                    = {};
  Access from                  = {};
  Labels labels                = {};
};
Node convert(Graph& graph, const Convert& spec);

}  // namespace stepgraph
