#pragma once
#include <map>
#include <optional>

#include "graphs/plan/plan.hpp"
#include "graphs/step/offload/balance.hpp"
#include "graphs/step/offload/homes.hpp"
#include "graphs/step/step_graph.hpp"

// Which buffers of a step are offloaded, and where they lie. Internal to graphs/.
namespace stepgraph {

// What the fields of the plan say: all units of a class, or none. With another strategy than manual: none.
[[nodiscard]] OffloadAmounts manual_amounts(const OffloadPlan& plan) noexcept;

// The units are the blocks of the model; a buffer that several blocks share, such as a gradient bucket, is a unit of
// its own. Activations have a unit for each layer and microbatch. A buffer with less than a thousandth of the bytes of
// its unit's largest buffer stays on the device: its transfers would take longer than they are worth.
//
// With host_bytes, homes lie in host memory as long as there is room: first params, then grads, activations and the
// optimizer. The others lie on disk. Throws Error(config) if they do not fit, with the bytes that are needed.
// `amounts_of`: of some ranks, instead of `amounts`. `rates`: of the machine; then updates are divided between device
// and host by balance_updates, instead of by OffloadAmounts::host_updates.
[[nodiscard]] HomePlan choose_homes(const StepGraph& step, const Plan& plan, const OffloadAmounts& amounts,
                                    const std::map<Rank, OffloadAmounts>& amounts_of = {},
                                    const std::optional<OffloadRates>& rates         = {});

// What was chosen, for people.
[[nodiscard]] std::vector<OffloadedUnit> offloaded_units(const Graph& before, const HomePlan& homes);

}  // namespace stepgraph
