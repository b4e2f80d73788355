#pragma once
#include <functional>
#include <span>

#include "graphs/step/memory_requirement.hpp"

// Plan::memory_limit_bytes, and the budgets of OffloadPlan: device_bytes, host_bytes and disk_bytes. A step that needs
// more throws Error(config). The message names the rank, its requirement by role, up to three changes of the config
// with which all ranks fit, and the budget with which they do. Each of them is really planned. They are written as
// arguments of `--set`. The search ends before it would have built more than 150,000 nodes, or 40 steps; the message
// then says what was not tried. The step without budgets, the first change and the first larger budget are always
// built, also those of a larger step.
namespace stepgraph {

// The smaller of both, and its key in a config; 0 bytes: no limit.
struct DeviceLimit {
  std::int64_t bytes   = 0;
  std::string_view key = {};
};
[[nodiscard]] DeviceLimit device_limit(const Plan& plan);

// Builds the same step with another plan or batch.
using BuildStep = std::function<StepGraph(const Plan& plan, const BatchSpec& batch)>;

// Checks a step that is built, with the options that it was built with.
void check_memory_limit(const StepGraph& step, const Plan& plan, const BuildStep& build,
                        const MemoryRequirementOptions& options = {});

// Checks requirements that memory_requirements returned for the same arguments.
void check_memory_limit(std::span<const MemoryRequirement> requirements, const Model& model, const Plan& plan,
                        const BatchSpec& batch, const MemoryRequirementOptions& options = {});

}  // namespace stepgraph
