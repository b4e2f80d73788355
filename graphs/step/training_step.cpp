#include "graphs/step/training_step.hpp"

#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/memory_limit.hpp"

namespace stepgraph {
namespace {

StepGraph within_limit(const Plan& plan, const BatchSpec& batch, const BuildStep& build, bool trains,
                       const StepOptions& options) {
  StepGraph step = build(plan, batch);
  check_memory_limit(step, plan, build,
                     {.trains              = trains,
                      .keep_gradients      = options.keep_gradients,
                      .update_first        = trains && options.update_first,
                      .rank                = {},
                      .join_tied_first     = options.join_tied_first,
                      .machine             = options.machine,
                      .simulator           = options.simulator,
                      .issue_order         = options.issue_order,
                      .workspaces          = options.workspaces,
                      .offload_rates       = options.offload_rates,
                      .device_memory_bytes = options.device_memory_bytes});
  return step;
}

}  // namespace

StepGraph training_step(const Model& model, const Plan& plan, const BatchSpec& batch, const StepOptions& options) {
  return within_limit(
      plan, batch, [&](const Plan& by, const BatchSpec& of) { return build_training_step(model, by, of, options); },
      true, options);
}

StepGraph forward_step(const Model& model, const Plan& plan, const BatchSpec& batch, ForwardResult result,
                       const StepOptions& options) {
  return within_limit(
      plan, batch,
      [&](const Plan& by, const BatchSpec& of) { return build_forward_step(model, by, of, result, options); }, false,
      options);
}

}  // namespace stepgraph
