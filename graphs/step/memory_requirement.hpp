#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/plan/memory_plan.hpp"
#include "graphs/step/memory_role.hpp"
#include "graphs/step/step_graph.hpp"

namespace stepgraph {

// The memory that a rank needs on its device for one step, read off the plan of its memory: what is alive where the
// most bytes are, by role. at_peak and unused_bytes add up to peak_bytes.
struct MemoryRequirement {
  Rank rank               = {};
  std::vector<Rank> ranks = {};                                 // who needs the same, this one among them; ascending
  std::array<std::int64_t, all_memory_roles.size()> at_peak{};  // by role
  std::int64_t unused_bytes      = 0;   // of the arena then: alignment, and what packing leaves between buffers
  std::int64_t peak_bytes        = 0;   // the arena: what a run allocates
  std::int64_t lower_bound_bytes = 0;   // no arena is smaller along the plan's order
  std::string node               = {};  // which runs then

  [[nodiscard]] std::int64_t operator[](MemoryRole role) const noexcept {
    return at_peak[static_cast<std::size_t>(role)];
  }
};

// As a plan of the step's graph has it; or that of the rank's slice, which is what a process that has this rank alone
// would plan. The two may differ a little: the whole knows when others send.
[[nodiscard]] MemoryRequirement memory_requirement(const StepGraph& step, const MemoryPlan& plan, Rank rank);
[[nodiscard]] MemoryRequirement memory_requirement(const StepGraph& step, Rank rank, Reuse reuse = Reuse::tight);

struct MemoryRequirementOptions {
  bool trains              = true;  // false: the step of an evaluation
  bool keep_gradients      = false;
  std::optional<Rank> rank = {};  // this one alone
};

// All ranks of a plan, by the first of those that are alike: that have the same stages and pieces of weights of the
// same shapes. One of each is built and planned, alone: nothing runs, no memory is allocated for tensors, and it costs
// what one rank of a kind costs. plan.memory_limit_bytes is not looked at.
[[nodiscard]] std::vector<MemoryRequirement> memory_requirements(const Model& model, const Plan& plan,
                                                                 const BatchSpec& batch,
                                                                 const MemoryRequirementOptions& options = {});

// The row of the rank that needs most; of equals the first. There must be one.
[[nodiscard]] const MemoryRequirement& largest(std::span<const MemoryRequirement> requirements);

// For people: two lines for each, in units that are easy to read and in bytes.
[[nodiscard]] std::string memory_table(std::span<const MemoryRequirement> requirements);
// "parameters 112 MiB, ..., unused 1 KiB": all that is not 0.
[[nodiscard]] std::string roles_text(const MemoryRequirement& requirement);

}  // namespace stepgraph
