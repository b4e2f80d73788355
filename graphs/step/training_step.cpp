#include "graphs/step/training_step.hpp"

#include <functional>

#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/memory/limits.hpp"
#include "graphs/step/offload/choose.hpp"

namespace stepgraph {
namespace {

using BuildWith = std::function<StepGraph(const Plan& plan, const BatchSpec& batch, const StepOptions& options)>;

// Amounts that were chosen for a plan are not those of another plan: these are chosen again.
// An evaluation gets the amounts of its training step, also where they are those of the plan.
StepOptions for_other_plan(StepOptions options, const Plan& plan, bool trains) {
  if (chooses_offload(plan, trains)) options.offload_of.clear();
  const double params = manual_amounts(plan.offload).params;
  if (options.offload &&
      (trains ? *options.offload == manual_amounts(plan.offload) : options.offload->params == params))
    options.offload.reset();
  return options;
}

StepGraph within_limit(const Model& model, const Plan& plan, const BatchSpec& batch, bool trains,
                       const StepOptions& options, const BuildWith& build) {
  const MemoryRequirementOptions asked = requirement_options(options, trains);
  std::int64_t num_nodes               = 0;
  try {
    StepGraph step = build(plan, batch, options);
    num_nodes      = step.graph.num_nodes();
    check_budgets(step, plan, asked);
    return step;
  } catch (const DoesNotFit& refused) {
    const auto other = [&](const Plan& by, const BatchSpec& of) {
      return build(by, of, for_other_plan(options, plan, trains));
    };
    const int num_own = options.only ? static_cast<int>(options.only->size()) : Layout(plan.layout).num_ranks();
    FitSearch search  = search_with(model, plan, batch, other, asked, num_own);
    search.num_nodes  = num_nodes;
    throw explained(refused, search);
  }
}

}  // namespace

StepGraph training_step(const Model& model, const Plan& plan, const BatchSpec& batch, const StepOptions& options) {
  return within_limit(model, plan, batch, true, options,
                      [&](const Plan& by, const BatchSpec& of, const StepOptions& with) {
                        return build_training_step(model, by, of, with);
                      });
}

StepGraph forward_step(const Model& model, const Plan& plan, const BatchSpec& batch, ForwardResult result,
                       const StepOptions& options) {
  return within_limit(model, plan, batch, false, options,
                      [&](const Plan& by, const BatchSpec& of, const StepOptions& with) {
                        return build_forward_step(model, by, of, result, with);
                      });
}

}  // namespace stepgraph
