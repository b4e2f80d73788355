#include "graphs/step/memory_requirement.hpp"

#include <algorithm>
#include <map>

#include "engine/base/error.hpp"
#include "engine/base/text.hpp"
#include "engine/base/words.hpp"
#include "engine/plan/memory_peak.hpp"
#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/builder/resolve.hpp"
#include "graphs/step/memory/likeness.hpp"
#include "graphs/step/memory/limits.hpp"
#include "graphs/step/pipeline.hpp"

namespace stepgraph {
namespace {

// `role` returns the role of a buffer of `graph`.
template <class Role>
MemoryRequirement requirement_of(const Graph& graph, const MemoryPlan& plan, Rank rank, const Role& role) {
  const MemoryPeak peak = memory_peak(graph, plan, rank);
  const ArenaPlan arena = plan.arena(rank);
  MemoryRequirement out{.rank              = rank,
                        .ranks             = {rank},
                        .unused_bytes      = arena.size_bytes,
                        .workspace_bytes   = plan.workspace_bytes(rank),
                        .peak_bytes        = plan.device_bytes(rank),
                        .lower_bound_bytes = arena.lower_bound + plan.workspace_bytes(rank),
                        .host_bytes        = plan.arena(rank, Space::pinned).size_bytes,
                        .disk_bytes        = plan.arena(rank, Space::disk).size_bytes};
  for (const Buffer buffer : peak.alive) {
    const std::int64_t bytes = graph.spec(buffer).size_bytes;
    out.at_peak[static_cast<std::size_t>(role(buffer))] += bytes;
    out.unused_bytes -= bytes;
  }
  if (peak.node) out.node = graph.name(*peak.node);
  if (out.workspace_bytes > 0) out.workspace_node = graph.name(plan.largest_workspace(rank).node);
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) out.num_nodes += graph.rank(Node{i}) == rank;
  return out;
}

// "0-3,8-11": runs of neighbouring ranks.
std::string ranks_text(const std::vector<Rank>& ranks) {
  constexpr std::size_t most_shown = 3;
  std::vector<std::string> runs;
  for (std::size_t i = 0, next; i < ranks.size(); i = next) {
    for (next = i + 1; next < ranks.size() && index(ranks[next]) == index(ranks[next - 1]) + 1;) ++next;
    runs.push_back(next == i + 1 ? str(ranks[i]) : str(ranks[i], "-", ranks[next - 1]));
  }
  const bool all = runs.size() <= most_shown;
  if (!all) runs.resize(most_shown);
  return join_text(runs, ",", [](const std::string& run) { return run; }) +
         (all ? "" : str(",.. (", ranks.size(), " ranks)"));
}

}  // namespace

std::string_view to_string(MemoryRole role) noexcept {
  constexpr std::array<std::string_view, all_memory_roles.size()> names{"parameters",  "gradients", "optimizer",
                                                                        "activations", "slots",     "other"};
  return names[static_cast<std::size_t>(role)];
}

MemoryRequirement memory_requirement(const StepGraph& step, const MemoryPlan& plan, Rank rank) {
  MemoryRequirement out = requirement_of(step.graph, plan, rank, [&](Buffer buffer) { return step.role(buffer); });
  out.layers            = step.activations(rank);
  return out;
}

MemoryRequirement memory_requirement(const StepGraph& step, Rank rank, const MemoryPlanOptions& planning) {
  if (step.graph.ranks() == RankSet(rank)) return memory_requirement(step, plan_memory(step.graph, planning), rank);
  const Graph own = slice(step.graph, rank);
  std::vector<MemoryRole> roles;  // a slice has the rank's buffers in the same order
  for (std::uint32_t i = 0; i < step.graph.num_buffers(); ++i) {
    if (step.graph.spec(Buffer{i}).rank == rank) roles.push_back(step.role(Buffer{i}));
  }
  MemoryRequirement out =
      requirement_of(own, plan_memory(own, planning), rank, [&](Buffer buffer) { return roles[buffer.id]; });
  out.layers = step.activations(rank);
  return out;
}

std::vector<MemoryRequirement> memory_requirements(const Model& model, const Plan& plan, const BatchSpec& batch,
                                                   const MemoryRequirementOptions& options) {
  try {
    return planned_requirements(model, plan, batch, options);
  } catch (const DoesNotFit& refused) {
    throw explained(refused, search_by_requirements(model, plan, batch, options));
  }
}

std::vector<MemoryRequirement> planned_requirements(const Model& model, const Plan& given, const BatchSpec& batch,
                                                    const MemoryRequirementOptions& options) {
  const Plan plan = with_split(model, given, batch, {.machine = options.machine, .search = options.trains});
  StepOptions building{.keep_gradients      = options.keep_gradients,
                       .update_first        = options.update_first,
                       .join_tied_first     = options.join_tied_first,
                       .machine             = options.machine,
                       .simulator           = options.simulator,
                       .issue_order         = options.issue_order,
                       .workspaces          = options.workspaces,
                       .offload_rates       = options.offload_rates,
                       .device_memory_bytes = options.device_memory_bytes};
  const auto requirement_of = [&](Rank rank) {
    building.only        = rank;
    const StepGraph step = options.trains ? build_training_step(model, plan, batch, building)
                                          : build_forward_step(model, plan, batch, ForwardResult::loss, building);
    return memory_requirement(
        step, rank, {.reuse = plan.reuse, .issue_order = options.issue_order, .workspaces = options.workspaces});
  };
  const int num_ranks = Layout(plan.layout).num_ranks();
  if (options.rank) {  // at the cost of its slice, however many ranks there are
    if (index(*options.rank) < 0 || index(*options.rank) >= num_ranks)
      throw Error(ErrorKind::config, str("rank ", *options.rank, ": is not in the layout (0 to ", num_ranks - 1, ")"));
    MemoryRequirement one = requirement_of(*options.rank);
    one.ranks             = {*options.rank};
    return {one};
  }
  RankKinds likeness(model, resolve(plan, model, batch, options.trains), batch, options.trains);
  std::map<Likeness, std::vector<Rank>> kinds;
  for (int rank = 0; rank < num_ranks; ++rank) kinds[likeness.of(Rank{rank})].push_back(Rank{rank});
  std::vector<MemoryRequirement> requirements;
  for (const auto& [kind, ranks] : kinds) {
    requirements.push_back(requirement_of(ranks.front()));
    requirements.back().ranks = ranks;
  }
  std::sort(requirements.begin(), requirements.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  return requirements;
}

const MemoryRequirement& largest(std::span<const MemoryRequirement> requirements) {
  return *std::max_element(requirements.begin(), requirements.end(),
                           [](const auto& a, const auto& b) { return a.peak_bytes < b.peak_bytes; });
}

std::string memory_table(std::span<const MemoryRequirement> requirements) {
  std::vector<std::vector<std::string>> lines;
  std::vector<std::string> titles{"ranks"};
  for (const MemoryRole role : all_memory_roles) titles.emplace_back(to_string(role));
  titles.emplace_back("unused");
  const auto has = [&](std::int64_t MemoryRequirement::*bytes) {
    return std::any_of(requirements.begin(), requirements.end(), [&](const auto& row) { return row.*bytes > 0; });
  };
  const bool has_workspaces = has(&MemoryRequirement::workspace_bytes), has_host = has(&MemoryRequirement::host_bytes),
             has_disk = has(&MemoryRequirement::disk_bytes);
  if (has_workspaces) titles.emplace_back("workspace");
  titles.insert(titles.end(), {"peak", "lower bound"});
  if (has_host) titles.emplace_back("host");
  if (has_disk) titles.emplace_back("disk");
  lines.push_back(std::move(titles));
  for (const MemoryRequirement& row : requirements) {
    std::vector<std::int64_t> bytes(row.at_peak.begin(), row.at_peak.end());
    bytes.push_back(row.unused_bytes);
    if (has_workspaces) bytes.push_back(row.workspace_bytes);
    bytes.insert(bytes.end(), {row.peak_bytes, row.lower_bound_bytes});
    if (has_host) bytes.push_back(row.host_bytes);
    if (has_disk) bytes.push_back(row.disk_bytes);
    std::vector<std::string> rounded{ranks_text(row.ranks)}, exact{""};
    for (const std::int64_t number : bytes) {
      rounded.push_back(bytes_text(static_cast<double>(number)));
      exact.push_back(str(number));
    }
    lines.push_back(std::move(rounded));
    lines.push_back(std::move(exact));
  }
  return table_text(lines);
}

std::string roles_text(const MemoryRequirement& requirement) {
  std::vector<std::string> parts;
  const auto add = [&](std::string_view name, std::int64_t bytes) {
    if (bytes != 0) parts.push_back(str(name, " ", bytes_text(static_cast<double>(bytes))));
  };
  for (const MemoryRole role : all_memory_roles) add(to_string(role), requirement[role]);
  add("unused", requirement.unused_bytes);
  add("workspace", requirement.workspace_bytes);
  return join_text(parts, ", ", [](const std::string& part) { return part; });
}

}  // namespace stepgraph
