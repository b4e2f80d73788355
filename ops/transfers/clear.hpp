#pragma once
#include <optional>
#include <string>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// values = 0, byte by byte. For buffers that later nodes accumulate into, or that no node writes.
struct Clear {
  std::string name             = {};
  std::optional<LaneKind> lane = {};  // none: only its access orders the node
  Access values                = {};  // one contiguous range
  Labels labels                = {};
};
Node clear(Graph& graph, const Clear& spec);

}  // namespace stepgraph
