#pragma once
#include <functional>

#include "engine/plan/memory_plan.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/step/step_graph.hpp"

// What stays on a device that has room left. Internal to graphs/.
namespace stepgraph {

// With strategy manual, states of the optimizer stay on a device that has room for them.
[[nodiscard]] bool fills_device(const OffloadPlan& plan) noexcept;

[[nodiscard]] MemoryPlan planned_memory(const StepGraph& step, const Plan& plan, const StepOptions& options);
// The time of a step on a device, with the order of its streams.
[[nodiscard]] double simulated_s(const StepGraph& step, const MemoryPlan& memory, const Machine& device);

// Builds the slice of a rank with given amounts.
using BuildOne = std::function<StepGraph(const OffloadAmounts& amounts)>;

// The amounts, with as much on the device as fits OffloadPlan::device_bytes: first units of the optimizer with their
// gradients, then gradients of other units that the device updates.
[[nodiscard]] OffloadAmounts filled_device(OffloadAmounts amounts, const Plan& plan, const StepOptions& options,
                                           const BuildOne& build);

// The same. With StepOptions::simulator, OffloadAmounts::host_scale is that with which the simulated step is shortest.
[[nodiscard]] OffloadAmounts fill_device(const OffloadAmounts& amounts, const Plan& plan, const StepOptions& options,
                                         const BuildOne& build);

}  // namespace stepgraph
