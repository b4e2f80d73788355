#pragma once
#include "engine/run/peers.hpp"
#include "graphs/step/pipeline.hpp"

namespace stepgraph {

// with_split for the processes of a world: process 0 computes it and tells the others. So all processes have the same
// stages and the same schedule, also where machines round differently. Collective, if there is something to compute;
// an error of process 0 is thrown in all. Without peers: with_split.
[[nodiscard]] Plan with_shared_split(const Model& model, const Plan& plan, const BatchSpec& batch, Peers* peers,
                                     const SplitOptions& options);

}  // namespace stepgraph
