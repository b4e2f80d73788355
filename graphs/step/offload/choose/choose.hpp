#pragma once
#include <vector>

#include "graphs/plan/plan.hpp"
#include "graphs/step/offload/choose/units.hpp"
#include "graphs/step/offload/homes.hpp"
#include "graphs/step/step_graph.hpp"

// Which buffers of a step are offloaded, and where they lie. Internal to graphs/.
namespace stepgraph {

// With OffloadPlan::overlap and without clipping, no update needs the norm of all gradients. Then each weight is
// updated in its own step, as soon as its gradient is complete. A loss scale needs the norm: it says whether a step is
// skipped.
[[nodiscard]] bool updates_early(const Plan& plan) noexcept;

// What the fields of the plan say: all units of a class, or none. With another strategy than manual: none.
[[nodiscard]] OffloadAmounts manual_amounts(const OffloadPlan& plan) noexcept;

// The units are the blocks of the model; a buffer that several blocks share, such as a gradient bucket, is a unit of
// its own. Activations have a unit for each layer and microbatch. A buffer with less than a thousandth of the bytes of
// its unit's largest buffer stays on the device: its transfers would take longer than they are worth.
//
// With host_bytes, homes lie in host memory as long as the memory plan has room for them: first params, then grads,
// activations and the optimizer. The others lie on disk. Throws Error(config) if they do not fit, with the bytes that
// are needed. Of `options`, these count: offload_of, instead of `amounts` for some ranks; offload_rates, by which
// updates are divided between device and host, instead of by OffloadAmounts::host_updates; issue_order and workspaces.
// `known`: keeps the units of the step between calls; null: they are found again.
[[nodiscard]] HomePlan choose_homes(const StepGraph& step, const Plan& plan, const OffloadAmounts& amounts,
                                    const StepOptions& options = {}, offload::StepUnits* known = nullptr);

// What was chosen, for people.
[[nodiscard]] std::vector<OffloadedUnit> offloaded_units(const Graph& before, const HomePlan& homes);

}  // namespace stepgraph
