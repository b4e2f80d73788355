#include "graphs/step/offload/choose/open_amounts.hpp"

#include <utility>
#include <vector>

#include "graphs/layout/layout.hpp"
#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/offload/choose/fill_device.hpp"
#include "graphs/step/offload/choose/layers.hpp"

namespace stepgraph {

bool chooses_offload(const Plan& plan, bool trains) noexcept {
  return plan.offload.strategy != OffloadStrategy::manual || stays_if_it_fits(plan.offload) ||
         (trains && plan.recompute == Recompute::automatic);
}

std::map<Rank, OffloadAmounts> choose_open_amounts(const Plan& plan, const StepOptions& options, bool trains,
                                                   const Slices& slices) {
  std::map<Rank, OffloadAmounts> whole = choose_nothing(plan, options, slices);
  std::vector<Rank> others;
  for (const Rank rank : options.only.value_or(RankSet::all(Layout(plan.layout).num_ranks()))) {
    if (!whole.contains(rank)) others.push_back(rank);
  }
  if (others.empty()) return whole;
  StepOptions chosen = options;
  if (!whole.empty()) chosen.only = RankSet(std::move(others));
  if (trains && plan.recompute == Recompute::automatic) {
    chosen.offload_of = choose_layers(plan, chosen, slices);
  } else if (plan.offload.strategy != OffloadStrategy::manual) {
    chosen.offload_of = choose_amounts(plan, chosen, slices);
  }
  if (trains && fills_device(plan.offload)) chosen.offload_of = keep_residents(plan, chosen, slices);
  chosen.offload_of.merge(whole);
  return chosen.offload_of;
}

OffloadPlan with_amounts(OffloadPlan plan, const std::optional<OffloadAmounts>& amounts) {
  if (!amounts) return plan;
  if (amounts->optimizer > 0) {
    plan.optimizer = true;
  } else if (plan.optimizer) {
    plan.overlap = false;
  }
  return plan;
}

StepOptions of_forward(StepOptions options) {
  const auto of_weights = [](const OffloadAmounts& all) { return OffloadAmounts{.params = all.params}; };
  if (options.offload) options.offload = of_weights(*options.offload);
  for (auto& [rank, amounts] : options.offload_of) amounts = of_weights(amounts);
  return options;
}

}  // namespace stepgraph
