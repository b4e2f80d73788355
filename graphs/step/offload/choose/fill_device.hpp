#pragma once
#include <functional>

#include "engine/plan/memory_plan.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/step/step_graph.hpp"

// What stays on a device that has room left. Internal to graphs/.
namespace stepgraph {

// With strategy manual, states of the optimizer stay on a device that has room for them.
[[nodiscard]] bool fills_device(const OffloadPlan& plan) noexcept;

// With strategy manual and device_bytes, nothing moves if the step fits without offload.
[[nodiscard]] bool stays_if_it_fits(const OffloadPlan& plan) noexcept;

// The bytes of the device for what stays there: the smaller of OffloadPlan::device_bytes and Plan::memory_limit_bytes.
// With several ranks 1/64 less, because the plan of all ranks can need a little more than the plans of their slices.
[[nodiscard]] std::int64_t budget_to_fill(const Plan& plan);

// OffloadAmounts::host_gradients has an effect: updates are in the next step, and gradients stay otherwise.
[[nodiscard]] bool may_move_host_gradients(const OffloadAmounts& amounts, const StepOptions& options) noexcept;

[[nodiscard]] MemoryPlan planned_memory(const StepGraph& step, const Plan& plan, const StepOptions& options);
// The device memory of its one rank in that plan.
[[nodiscard]] std::int64_t planned_device_bytes(const StepGraph& step, const Plan& plan, const StepOptions& options);
// The time of a step on a device, with the order of its streams.
[[nodiscard]] double simulated_s(const StepGraph& step, const MemoryPlan& memory, const Machine& device);

// Builds the slice of a rank with given amounts.
using BuildOne = std::function<StepGraph(const OffloadAmounts& amounts)>;

// The amounts, with as much on the device as fits OffloadPlan::device_bytes: first units of the optimizer with their
// gradients, then gradients of other units that the device updates. Gradients that only the host needs leave the device
// (OffloadAmounts::host_gradients), if they fit OffloadPlan::host_bytes.
[[nodiscard]] OffloadAmounts filled_device(const OffloadAmounts& amounts, const Plan& plan, const StepOptions& options,
                                           const BuildOne& build);

// The same. With StepOptions::simulator, OffloadAmounts::host_scale and host_gradients are those with which the
// simulated step is shortest.
[[nodiscard]] OffloadAmounts fill_device(const OffloadAmounts& amounts, const Plan& plan, const StepOptions& options,
                                         const BuildOne& build);

}  // namespace stepgraph
