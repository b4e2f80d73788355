#pragma once
#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/step/step_graph.hpp"

namespace stepgraph {

// One training step for all ranks: forward, backward and gradient accumulation over microbatches in the schedule's
// order, tensor-parallel collectives, sends and receives between stages, reduction over data-parallel ranks, clipping,
// update. Throws Error(config) where model, plan and batch do not fit together, and where a rank needs more memory than
// the plan allows; that message names a change with which the step fits.
[[nodiscard]] StepGraph training_step(const Model& model, const Plan& plan, const BatchSpec& batch,
                                      const StepOptions& options = {});

// The update that is left after the last run of a step with StepOptions::update_first: the nodes of the phase
// `update_phase` alone, on the same buffers. After it has run, StepRank::factor is to be set to NaN.
[[nodiscard]] StepGraph updates_of(const StepGraph& step);

// Forward only. Throws as training_step does.
[[nodiscard]] StepGraph forward_step(const Model& model, const Plan& plan, const BatchSpec& batch,
                                     ForwardResult result = ForwardResult::loss, const StepOptions& options = {});

}  // namespace stepgraph
