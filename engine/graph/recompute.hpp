#pragma once
#include <cstdint>
#include <functional>
#include <string_view>

#include "engine/graph/graph.hpp"

namespace stepgraph {

inline constexpr std::string_view recompute_phase = "recompute";  // the label of nodes that run again

// The role of a node in recomputation.
struct RecomputePlace {
  enum class Role : std::uint8_t {
    outside,  // not involved
    region,   // may run again
    reader,   // reads the results of the second run instead of those of the first
  };
  Role role           = Role::outside;
  std::int64_t region = 0;  // a number of the caller's choice; regions of different ranks are never the same
};
using RecomputePlaces = std::function<RecomputePlace(Node)>;

// A pass (activation checkpointing): nodes of a region run a second time, into buffers of their own, directly before
// the region's first reader in the order of nodes. Readers read those buffers. A buffer of the region that no other
// node reads then ends its life with the forward pass. Only nodes whose results readers need run again. Nodes that are
// not readers (the next layer, a message) read what they read before. Other buffers keep their numbers; the new ones
// come after them.
//
// A second run is the same node with other buffers: same body, cost and part, phase `recompute_phase`. It reads again
// what the region read from outside, so that must still be there. If another node, or one of the region, has written
// over it, Error(graph) names node and buffer. A collective is issued again after all parts that come before it in the
// order of nodes; members whose regions and readers are alike issue it alike. Messages are never sent again: what they
// brought counts as read from outside.
//
// Each rank is treated alone: the pass on a slice gives the slice of the pass. A graph without readers (forward only)
// is returned unchanged.
[[nodiscard]] Graph recompute(const Graph& graph, const RecomputePlaces& places);

}  // namespace stepgraph
