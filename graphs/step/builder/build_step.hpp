#pragma once
#include <map>

#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/step/step_graph.hpp"

// Builds a step without looking at Plan::memory_limit_bytes: internal to graphs/. The memory requirement of a plan is
// read off such a step, and the limit is checked with memory requirements; so training_step comes after both.
namespace stepgraph {

// The plan leaves something to choose: a strategy of offload, or a device that may be large enough without offload; if
// the step trains, also Recompute::automatic.
[[nodiscard]] bool chooses_offload(const Plan& plan, bool trains) noexcept;
// What build_training_step would choose for the ranks of options.only: for StepOptions::offload_of. Empty: nothing is
// left to choose.
[[nodiscard]] std::map<Rank, OffloadAmounts> choose_offload(const Model& model, const Plan& plan,
                                                            const BatchSpec& batch, const StepOptions& options);

[[nodiscard]] StepGraph build_training_step(const Model& model, const Plan& plan, const BatchSpec& batch,
                                            const StepOptions& options);
// With UpdateWhen::asynchronous: a window of options.window steps (graphs/step/asynchronous.hpp).
[[nodiscard]] StepGraph build_asynchronous_window(const Model& model, const Plan& plan, const BatchSpec& batch,
                                                  const StepOptions& options);
[[nodiscard]] StepGraph build_forward_step(const Model& model, const Plan& plan, const BatchSpec& batch,
                                           ForwardResult result, const StepOptions& options);

}  // namespace stepgraph
