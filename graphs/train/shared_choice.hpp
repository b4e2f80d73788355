#pragma once
#include "engine/run/peers.hpp"
#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/step/step_graph.hpp"

namespace stepgraph {

// Options with which the processes of a world build the same training step, also if they have different devices or
// measurements. Process 0 chooses what the plan leaves open (layers that are recomputed, units that stay on a device,
// strategies of offload) and tells the others: StepOptions::offload_of has the amounts of all ranks. It chooses for the
// smallest device of all processes. Its offload_rates are those of all. Collective, if there is something to choose; an
// error of process 0 is thrown in all. Without peers: the options as they are.
[[nodiscard]] StepOptions with_shared_choice(const Model& model, const Plan& plan, const BatchSpec& batch, Peers* peers,
                                             const StepOptions& options);

}  // namespace stepgraph
