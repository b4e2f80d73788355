#pragma once
#include <map>
#include <optional>

#include "graphs/plan/plan.hpp"
#include "graphs/step/offload/choose/strategy.hpp"
#include "graphs/step/step_graph.hpp"

// Which amounts of offload count for a step: those that options give, or those that are chosen. Internal to graphs/.
namespace stepgraph {

// What the plan leaves open, for the ranks of options.only. First, ranks that fit without offload move nothing; then
// the layers, a strategy, and what fills the device are chosen.
[[nodiscard]] std::map<Rank, OffloadAmounts> choose_open_amounts(const Plan& plan, const StepOptions& options,
                                                                 bool trains, const Slices& slices);

// StepOptions::offload replaces the fields of the plan, also where they say when updates run.
[[nodiscard]] OffloadPlan with_amounts(OffloadPlan plan, const std::optional<OffloadAmounts>& amounts);

// Of amounts that were chosen for a training step, those of weights count in a forward step. It has nothing else.
[[nodiscard]] StepOptions of_forward(StepOptions options);

}  // namespace stepgraph
