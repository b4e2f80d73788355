#pragma once
#include <cstdint>
#include <functional>

#include "engine/graph/graph.hpp"
#include "graphs/plan/recompute.hpp"

namespace stepgraph {

// Where a node stands in recomputation.
struct RecomputePlace {
  enum class Role : std::uint8_t {
    outside,  // has nothing to do with it
    region,   // may be computed again
    reader,   // gets what is computed again, where it would have read what the region wrote
  };
  Role role           = Role::outside;
  std::int64_t region = 0;  // which of its rank's; regions of different ranks are never one
};
using RecomputePlaces = std::function<RecomputePlace(Node)>;

// A pass: nodes of a region run a second time, into buffers of their own, right before the region's first reader in the
// order of nodes; readers get those buffers. What nobody else reads of the region then dies where the forward pass is
// done with it. Only what readers need is computed again. Who is no reader, the next layer or a message, keeps reading
// what it read. Other buffers keep their numbers, the new ones come after them.
//
// A second run is the same node with other bytes: same body, cost and part, phase "recompute". What the region got from
// outside is read again, so it must still be there: where it was written over, by a node of the region or another one,
// Error(graph) names node and buffer. A collective is issued again after all parts that come before it in the order of
// nodes; members whose regions and readers are alike issue it alike. Messages are never sent again: what they bring is
// from outside.
//
// Each rank is treated alone: the pass on a slice gives the slice of the pass. A graph without readers, forward only,
// comes back as it is.
[[nodiscard]] Graph recompute(const Graph& graph, const RecomputePlaces& places);

// The same with the regions of a training step, which the labels of its nodes tell: of one microbatch and one layer,
// the nodes of phase "forward" (full), or of those the ones with op "attention" (selective). Readers are the nodes of
// other phases with equal microbatch and layer; for selective, the ones that read what the region wrote.
[[nodiscard]] Graph recompute(const Graph& graph, Recompute kind);

}  // namespace stepgraph
