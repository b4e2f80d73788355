#include "graphs/step/memory_limit.hpp"

#include "engine/base/error.hpp"
#include "engine/base/size.hpp"
#include "engine/base/text.hpp"
#include "engine/plan/planned_sizes.hpp"
#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/memory/limits.hpp"

namespace stepgraph {
namespace {

MemoryPlanOptions planning_of(const Plan& plan, const MemoryRequirementOptions& options) {
  return {.reuse = plan.reuse, .issue_order = options.issue_order, .workspaces = options.workspaces};
}

// Limits that drive no choice change nothing in a step. Without them a build that checks limits does not search again.
Plan without_idle_limits(Plan plan, bool trains) {
  if (chooses_offload(plan, trains)) return plan;
  plan.memory_limit_bytes = plan.offload.device_bytes = 0;
  return plan;
}

void check_homes(Rank rank, std::int64_t host_bytes, std::int64_t disk_bytes, const OffloadPlan& plan) {
  const auto check = [&](std::string_view key, std::int64_t needed, std::int64_t budget, std::string_view where) {
    if (budget == 0 || needed <= budget) return;
    throw DoesNotFit(std::string(key), needed,
                     str(key, ": rank ", rank, " needs ", bytes_and_text(needed), " ", where, "; the budget is ",
                         limit_and_text(budget)));
  };
  check("offload.host_bytes", host_bytes, plan.host_bytes, "of host memory");
  check("offload.disk_bytes", disk_bytes, plan.disk_bytes, "on disk");
}

void check_device(const MemoryRequirement& needed, const Plan& plan) {
  const DeviceLimit limit = device_limit(plan);
  if (limit.bytes == 0 || needed.peak_bytes <= limit.bytes) return;
  throw DoesNotFit(std::string(limit.key), needed.peak_bytes,
                   str(limit.key, ": rank ", needed.rank, " needs ", bytes_and_text(needed.peak_bytes), ": ",
                       roles_text(needed), "; the limit is ", limit_and_text(limit.bytes)));
}

}  // namespace

DeviceLimit device_limit(const Plan& plan) {
  const DeviceLimit memory{plan.memory_limit_bytes, "memory.limit_bytes"},
      offload{plan.offload.device_bytes, "offload.device_bytes"};
  if (memory.bytes == 0 || (offload.bytes != 0 && offload.bytes < memory.bytes)) return offload;
  return memory;
}

MemoryRequirementOptions requirement_options(const StepOptions& options, bool trains) {
  return {.trains              = trains,
          .keep_gradients      = options.keep_gradients,
          .update_first        = trains && options.update_first,
          .rank                = {},
          .join_tied_first     = options.join_tied_first,
          .machine             = options.machine,
          .simulator           = options.simulator,
          .issue_order         = options.issue_order,
          .workspaces          = options.workspaces,
          .offload_rates       = options.offload_rates,
          .device_memory_bytes = options.device_memory_bytes};
}

void check_budgets(const StepGraph& step, const Plan& plan, const MemoryRequirementOptions& options) {
  const std::int64_t limit = device_limit(plan).bytes;
  if (limit == 0 && plan.offload.host_bytes == 0 && plan.offload.disk_bytes == 0) return;
  const PlannedSizes sizes = planned_sizes(step.graph, planning_of(plan, options));
  for (const Rank rank : step.graph.ranks())
    check_homes(rank, sizes.arena(rank, Space::pinned), sizes.arena(rank, Space::disk), plan.offload);
  const PlannedNeed need = need_of(step.graph, sizes);
  if (limit == 0 || need.device <= limit) return;
  check_device(memory_requirement(step, plan_memory(step.graph, planning_of(plan, options)), need.rank), plan);
}

FitSearch search_with(const Model& model, const Plan& plan, const BatchSpec& batch, const BuildStep& build,
                      const MemoryRequirementOptions& options, int num_own) {
  FitSearch search = search_by_requirements(model, plan, batch, options);
  search.slices    = std::move(search.whole);
  search.whole     = [=](const Plan& by, const BatchSpec& of) {
    const StepGraph step = build(without_idle_limits(by, options.trains), of);
    return need_of(step.graph, planned_sizes(step.graph, planning_of(by, options)));
  };
  search.has_all    = num_own == Layout(plan.layout).num_ranks();
  search.of_a_slice = static_cast<double>(plan.layout.pp) / num_own;
  return search;
}

FitSearch search_by_requirements(const Model& model, const Plan& plan, const BatchSpec& batch,
                                 const MemoryRequirementOptions& options) {
  MemoryRequirementOptions of_all = options;
  of_all.rank.reset();
  const auto whole = [=](const Plan& by, const BatchSpec& of) {
    return need_of(planned_requirements(model, by, of, of_all));
  };
  return {.plan = plan, .batch = batch, .trains = options.trains, .whole = whole, .has_all = !options.rank};
}

void check_memory_limit(const StepGraph& step, const Plan& plan, const BuildStep& build,
                        const MemoryRequirementOptions& options) {
  try {
    check_budgets(step, plan, options);
  } catch (const DoesNotFit& refused) {
    const auto num_own = static_cast<int>(step.graph.ranks().size());
    FitSearch search   = search_with(step.model, plan, step.batch, build, options, num_own);
    search.num_nodes   = step.graph.num_nodes();
    throw explained(refused, search);
  }
}

void check_memory_limit(std::span<const MemoryRequirement> requirements, const Model& model, const Plan& plan,
                        const BatchSpec& batch, const MemoryRequirementOptions& options) {
  try {
    for (const MemoryRequirement& row : requirements)
      check_homes(row.rank, row.host_bytes, row.disk_bytes, plan.offload);
    check_device(largest(requirements), plan);
  } catch (const DoesNotFit& refused) {
    FitSearch search = search_by_requirements(model, plan, batch, options);
    search.num_nodes = need_of(requirements).num_nodes * (options.rank ? plan.layout.pp : 1);
    throw explained(refused, search);
  }
}

}  // namespace stepgraph
