#pragma once
#include <vector>

#include "graphs/step/memory/what_fits.hpp"
#include "graphs/step/memory_limit.hpp"

// memory_limit.hpp and memory_requirement.hpp without explanations: a step that does not fit throws DoesNotFit.
// Internal to graphs/.
namespace stepgraph {

// Options for the requirements of a step with these options.
[[nodiscard]] MemoryRequirementOptions requirement_options(const StepOptions& options, bool trains);

void check_budgets(const StepGraph& step, const Plan& plan, const MemoryRequirementOptions& options);

[[nodiscard]] std::vector<MemoryRequirement> planned_requirements(const Model& model, const Plan& plan,
                                                                  const BatchSpec& batch,
                                                                  const MemoryRequirementOptions& options);

// The search that explained() uses, for a step that `build` builds with `num_own` of the ranks of the layout.
[[nodiscard]] FitSearch search_with(const Model& model, const Plan& plan, const BatchSpec& batch,
                                    const BuildStep& build, const MemoryRequirementOptions& options, int num_own);
// The same by the requirements of unlike ranks, also if `options` has one rank alone.
[[nodiscard]] FitSearch search_by_requirements(const Model& model, const Plan& plan, const BatchSpec& batch,
                                               const MemoryRequirementOptions& options);

}  // namespace stepgraph
