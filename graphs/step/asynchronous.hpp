#pragma once
#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/step/step_graph.hpp"

// UpdateWhen::asynchronous: data-parallel ranks do not wait for each other.
namespace stepgraph {

inline constexpr int most_window_steps = 4096;

// A window of steps of all ranks, as one graph. In every step a rank
// - passes its gate: every other rank has completed step s - 1 - max_staleness. Steps up to max_staleness have none;
// - takes the newest complete version of the weights that all ranks share, into weights of its own;
// - computes the gradient of its share of the batch, as a step of one rank does, with its norm and its clip factor;
// - gives the gradient: the newest version is updated, and becomes the next version.
// The window begins and ends with all ranks together. Then all ranks have the newest version in their weights.
//
// StepGraph::window has the buffers of each step. Each optimizer state and each version is a buffer of one rank; the
// weights are divided over the ranks. One run at a time: programs of one graph share its store of versions.
// Throws as training_step does, and Error(config) for what the mode cannot be combined with.
[[nodiscard]] StepGraph asynchronous_window(const Model& model, const Plan& plan, const BatchSpec& batch, int steps,
                                            const StepOptions& options = {});

// The steps of a window as commands choose them: 16, or fewer if the graph would be very large; 1 in other modes.
[[nodiscard]] int usual_window(const Model& model, const Plan& plan, const BatchSpec& batch);

// Throws Error(config) if the plan has something that an asynchronous window cannot have.
void check_asynchronous(const Plan& plan, const StepOptions& options);

}  // namespace stepgraph
