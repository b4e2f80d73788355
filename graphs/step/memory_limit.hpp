#pragma once
#include <functional>
#include <span>

#include "graphs/step/memory_requirement.hpp"

// Plan::memory_limit_bytes. What is over it is refused, Error(config): the error names the rank, what it needs by role,
// and what would fit: the first of some changes to the config with which all ranks do, as planned here and now. They
// are written as `--set` takes them.
namespace stepgraph {

// The step of another plan or batch, built as the one that is looked at was.
using BuildStep = std::function<StepGraph(const Plan& plan, const BatchSpec& batch)>;

// A step as it will run: planned as a whole where all ranks are in it.
void check_memory_limit(const StepGraph& step, const Plan& plan, const BuildStep& build);

// What memory_requirements found for the same arguments.
void check_memory_limit(std::span<const MemoryRequirement> requirements, const Model& model, const Plan& plan,
                        const BatchSpec& batch, const MemoryRequirementOptions& options = {});

}  // namespace stepgraph
