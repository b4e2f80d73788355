#pragma once
#include <cstdint>
#include <functional>

#include "engine/graph/graph.hpp"
#include "engine/graph/recompute.hpp"
#include "graphs/plan/recompute.hpp"

namespace stepgraph {

// The pass of engine/graph/recompute.hpp with the regions of a training step. Labels tell them: a region is one layer
// of one microbatch. `full` takes its nodes of phase "forward", `selective` those of them with op "attention". Readers
// are the nodes of other phases with the same microbatch and layer; with `selective`, only those that read what the
// region wrote.
[[nodiscard]] Graph recompute(const Graph& graph, Recompute kind);

// The same with a kind for each layer of each rank: none, selective or full. Ranks that share a layer must have the
// same kind, because members of a collective issue it alike.
using RecomputeOfLayer = std::function<Recompute(Rank rank, int layer)>;
[[nodiscard]] Graph recompute(const Graph& graph, const RecomputeOfLayer& kind_of);

}  // namespace stepgraph
