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

// The device memory that a rank needs for one step, from its memory plan: the bytes of live buffers at the peak, by
// role, and the workspaces of its streams. at_peak, unused_bytes and workspace_bytes add up to peak_bytes.
struct MemoryRequirement {
  Rank rank               = {};
  std::vector<Rank> ranks = {};  // all ranks with the same requirement, this one included; ascending
  std::array<std::int64_t, all_memory_roles.size()> at_peak{};  // by role
  std::int64_t unused_bytes              = 0;   // of the arena at the peak: alignment, and gaps between buffers
  std::int64_t workspace_bytes           = 0;   // of all streams of the rank; 0 on the host
  std::int64_t peak_bytes                = 0;   // what a run allocates: the arena and the workspaces
  std::int64_t lower_bound_bytes         = 0;   // no arena for the plan's order is smaller; with the workspaces
  std::int64_t host_bytes                = 0;   // beside the device: of host memory for what is offloaded ...
  std::int64_t disk_bytes                = 0;   // ... and on disk
  std::string node                       = {};  // the node that runs at the peak of the arena
  std::string workspace_node             = {};  // the node that needs the largest workspace; empty: there is none
  std::int64_t num_nodes                 = 0;   // of the rank in a step
  std::optional<ActivationCounts> layers = {};  // with Recompute::automatic: what was chosen for the rank's layers

  [[nodiscard]] std::int64_t operator[](MemoryRole role) const noexcept {
    return at_peak[static_cast<std::size_t>(role)];
  }
};

// From a plan of the whole step; or from a plan of the rank's slice, as a process with this rank alone would make it.
// The two can differ a little: only the whole step knows when other ranks send.
[[nodiscard]] MemoryRequirement memory_requirement(const StepGraph& step, const MemoryPlan& plan, Rank rank);
[[nodiscard]] MemoryRequirement memory_requirement(const StepGraph& step, Rank rank,
                                                   const MemoryPlanOptions& planning = {});

struct MemoryRequirementOptions {
  bool trains               = true;             // false: a forward step
  bool keep_gradients       = false;            // StepOptions::keep_gradients ...
  bool update_first         = false;            // ... and update_first
  std::optional<Rank> rank  = {};               // only this rank: it costs what the rank's slice costs
  bool join_tied_first      = false;            // StepOptions::join_tied_first ...
  const Machine* machine    = nullptr;          // ... machine ...
  const Machine* simulator  = nullptr;          // ... and simulator
  IssueOrder issue_order    = IssueOrder::any;  // of the world on which the step would run ...
  WorkspaceNeeds workspaces = {};               // ... and its workspaces
  // StepOptions::offload_rates and device_memory_bytes
  std::optional<OffloadRates> offload_rates = {};
  std::int64_t device_memory_bytes          = 0;
};

// The requirements of all ranks of a plan. Ranks with the same stages and with weights of the same shapes need the same
// memory: without `rank` they are one entry, and one slice is built and planned for them. Nothing runs, and no memory
// is allocated for tensors. plan.memory_limit_bytes is ignored.
[[nodiscard]] std::vector<MemoryRequirement> memory_requirements(const Model& model, const Plan& plan,
                                                                 const BatchSpec& batch,
                                                                 const MemoryRequirementOptions& options = {});

// The largest requirement; of equals, the first. There must be at least one.
[[nodiscard]] const MemoryRequirement& largest(std::span<const MemoryRequirement> requirements);

// A table for people: two lines for each requirement, one rounded and one in bytes. Without workspaces it has no column
// for them; likewise for host memory and disk.
[[nodiscard]] std::string memory_table(std::span<const MemoryRequirement> requirements);
// "parameters 112 MiB, ..., unused 1 KiB, workspace 64 MiB": all with more than 0 bytes.
[[nodiscard]] std::string roles_text(const MemoryRequirement& requirement);

}  // namespace stepgraph
