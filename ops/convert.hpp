#pragma once
#include <optional>
#include <string>

#include "engine/graph.hpp"

namespace stepgraph {

// to = from, in the element type of `to`: f32 and bf16, in either direction. Rounds to the nearest; widening is exact.
struct Convert {
  std::string name             = {};
  std::optional<LaneKind> lane = LaneKind::reduce;  // none: only its accesses order it
  Access to                    = {};
  Access from                  = {};
  Labels labels                = {};
};
Node convert(Graph& graph, const Convert& spec);

}  // namespace stepgraph
