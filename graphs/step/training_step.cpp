#include "graphs/step/training_step.hpp"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/memory/limits.hpp"
#include "graphs/step/offload/choose/choose.hpp"
#include "graphs/step/offload/choose/fill_device.hpp"

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

// Of a step with all ranks: ranks move nothing, because their slices fit the device without offload; but in the plan of
// all ranks, which can need a little more, one of them does not fit.
bool stays_wrongly(const DoesNotFit& refused, const StepGraph& step, const Plan& plan, const StepOptions& options) {
  if (options.offload || !stays_if_it_fits(plan.offload) || refused.key() != device_limit(plan).key) return false;
  if (static_cast<int>(step.graph.ranks().size()) != step.layout.num_ranks()) return false;
  return std::ranges::any_of(step.offload.amounts_of, [](const auto& of) { return of.second == OffloadAmounts{}; });
}

// Moves all that the plan says. None: this does not fit either.
std::optional<StepGraph> with_all_moved(const Plan& plan, const BatchSpec& batch, StepOptions options,
                                        const BuildWith& build, const MemoryRequirementOptions& asked) {
  options.offload = manual_amounts(plan.offload);
  options.offload_of.clear();
  try {
    StepGraph step = build(plan, batch, options);
    check_budgets(step, plan, asked);
    return step;
  } catch (const DoesNotFit&) {
    return std::nullopt;
  }
}

StepGraph within_limit(const Model& model, const Plan& plan, const BatchSpec& batch, bool trains,
                       const StepOptions& options, const BuildWith& build) {
  const MemoryRequirementOptions asked = requirement_options(options, trains);
  std::optional<StepGraph> step;
  try {
    step = build(plan, batch, options);
    check_budgets(*step, plan, asked);
    return std::move(*step);
  } catch (const DoesNotFit& refused) {
    if (step && stays_wrongly(refused, *step, plan, options)) {
      if (auto moved = with_all_moved(plan, batch, options, build, asked)) return std::move(*moved);
    }
    const auto other = [&](const Plan& by, const BatchSpec& of) {
      return build(by, of, for_other_plan(options, plan, trains));
    };
    const int num_own = options.only ? static_cast<int>(options.only->size()) : Layout(plan.layout).num_ranks();
    FitSearch search  = search_with(model, plan, batch, other, asked, num_own);
    search.num_nodes  = step ? step->graph.num_nodes() : 0;
    step.reset();
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
