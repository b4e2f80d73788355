#pragma once
#include <optional>
#include <string>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// values = 0, byte by byte: what nobody has added to yet, or ever will.
struct Clear {
  std::string name             = {};
  std::optional<LaneKind> lane = {};  // none: only its access orders it
  Access values                = {};  // one range
  Labels labels                = {};
};
Node clear(Graph& graph, const Clear& spec);

}  // namespace stepgraph
