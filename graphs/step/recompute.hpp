#pragma once
#include <cstdint>
#include "engine/graph/graph.hpp"
#include "engine/graph/recompute.hpp"
#include "graphs/plan/recompute.hpp"

namespace stepgraph {

// The pass of engine/graph/recompute.hpp with the regions of a training step. Labels tell them: a region is one layer
// of one microbatch. `full` takes its nodes of phase "forward", `selective` those of them with op "attention". Readers
// are the nodes of other phases with the same microbatch and layer; with `selective`, only those that read what the
// region wrote.
[[nodiscard]] Graph recompute(const Graph& graph, Recompute kind);

}  // namespace stepgraph
