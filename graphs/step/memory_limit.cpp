#include "graphs/step/memory_limit.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>

#include "engine/base/error.hpp"
#include "engine/base/text.hpp"
#include "engine/base/words.hpp"
#include "engine/plan/planned_sizes.hpp"
#include "graphs/step/memory_requirement.hpp"

namespace stepgraph {
namespace {

// A plan that may need less memory, and the settings that lead to it.
struct Change {
  std::vector<std::string> settings = {};  // "recompute=full"
  Plan plan                         = {};
  BatchSpec batch                   = {};

  [[nodiscard]] Change with(std::string setting, const auto& change) const {
    Change out = *this;
    out.settings.push_back(std::move(setting));
    change(out);
    return out;
  }
};

// The rank that needs the most device memory; of equals, the first.
struct Most {
  Rank rank          = {};
  std::int64_t bytes = 0;
};
Most most_of(const RankSet& ranks, const PlannedSizes& sizes) {
  std::map<Rank, std::int64_t> workspaces;
  for (const WorkspacePlan& workspace : sizes.workspaces) workspaces[workspace.rank] += workspace.size_bytes;
  Most most{.rank = ranks[0]};
  for (const Rank rank : ranks) {
    const std::int64_t needed = sizes.arena(rank, Space::device) + workspaces[rank];
    if (needed > most.bytes) most = {rank, needed};
  }
  return most;
}

// Smaller microbatches, the largest first.
std::vector<Change> with_smaller_microbatches(const Change& from) {
  std::vector<Change> out;
  const int sequences = from.batch.global / from.plan.layout.dp;
  for (int micro = from.batch.micro - 1; micro >= 1; --micro) {
    if (sequences % micro != 0) continue;
    std::string setting = "batch.micro=";
    setting += std::to_string(micro);
    out.push_back(from.with(std::move(setting), [&](Change& change) { change.batch.micro = micro; }));
  }
  return out;
}

// Strategies of offload and recompute auto still need their budget.
Plan without_limit(Plan plan) {
  if (plan.recompute == Recompute::automatic) return plan;
  plan.memory_limit_bytes = 0;
  if (plan.offload.strategy == OffloadStrategy::manual) plan.offload.device_bytes = 0;
  return plan;
}

// Classes of offload, one after another, where the budget of a device was given for them.
std::vector<Change> with_more_offload(Change from, const Plan& plan, bool trains) {
  std::vector<Change> out;
  if (plan.offload.strategy != OffloadStrategy::manual || device_limit(plan).key != "offload.device_bytes") return out;
  const auto add = [&](std::string_view key, bool OffloadPlan::*field) {
    if (plan.offload.*field) return;
    from = from.with(str("offload.", key, "=true"), [&](Change& change) { change.plan.offload.*field = true; });
    out.push_back(from);
  };
  if (trains) add("optimizer", &OffloadPlan::optimizer);
  if (trains) add("grads", &OffloadPlan::grads);
  add("params", &OffloadPlan::params);
  if (trains) add("activations", &OffloadPlan::activations);
  return out;
}

// In the order in which they are tried: the cheapest first, all together last.
std::vector<Change> changes(const Plan& plan, const BatchSpec& batch, bool trains) {
  Change from{.settings = {}, .plan = without_limit(plan), .batch = batch};
  std::vector<Change> out = with_more_offload(from, plan, trains);
  if (plan.reuse != Reuse::tight) {
    from = from.with("memory.reuse=tight", [](Change& change) { change.plan.reuse = Reuse::tight; });
    out.push_back(from);
  }
  const auto with_recompute = [&](Recompute kind) {
    return from.with(str("recompute=", kind), [&](Change& change) { change.plan.recompute = kind; });
  };
  for (const Recompute kind : {Recompute::selective, Recompute::full}) {
    if (trains && plan.recompute < kind) out.push_back(with_recompute(kind));
  }
  const auto with_shard = [&](const Change& of, Shard strategy, ReduceWhen reduce) {
    const std::string setting =
        str("shard.strategy=", to_string(strategy), reduce == ReduceWhen::each ? " shard.reduce=each" : "");
    return of.with(setting, [&](Change& change) {
      change.plan.shard.strategy = strategy;
      change.plan.shard.reduce   = reduce;
    });
  };
  const bool shards = trains && plan.layout.dp > 1 && plan.shard.strategy != Shard::hybrid &&
                      !plan.shard.delay_all_reduce;  // other strategies do not have it
  for (const Shard strategy : {Shard::zero1, Shard::grad_op, Shard::full}) {
    if (shards && plan.shard.strategy < strategy) out.push_back(with_shard(from, strategy, plan.shard.reduce));
  }
  if (shards && plan.shard.reduce != ReduceWhen::each) out.push_back(with_shard(from, Shard::full, ReduceWhen::each));
  const std::vector<Change> smaller = with_smaller_microbatches(from);
  out.insert(out.end(), smaller.begin(), smaller.end());
  if (trains && plan.recompute != Recompute::full) {
    const std::vector<Change> both = with_smaller_microbatches(with_recompute(Recompute::full));
    out.insert(out.end(), both.begin(), both.end());
  }
  if (shards) {
    const Change all = with_shard(with_recompute(Recompute::full), Shard::full, ReduceWhen::each);
    out.push_back(all);
    const std::vector<Change> smallest = with_smaller_microbatches(all);
    out.insert(out.end(), smallest.begin(), smallest.end());
  }
  return out;
}

std::string settings_text(const Change& change) {
  return join_text(change.settings, " ", [](const std::string& setting) { return setting; });
}

// The peak of the rank that needs most. Throws where the step cannot be built.
using PeakOf = std::function<std::int64_t(const Plan& plan, const BatchSpec& batch)>;

// Plans steps with less memory, one after another. Building a step takes time, so the search ends before it would have
// built more than `most_nodes`. Large steps of several ranks are tried by the slices of unlike ranks, which are fewer
// nodes; a step that fits is then planned as a whole, as a run would plan it.
struct Search {
  std::int64_t num_nodes = 0;   // of the step that does not fit
  double slice_share     = 1;   // of the nodes of a step that are built for the slices of unlike ranks
  PeakOf whole           = {};  // of the whole step
  PeakOf slices          = {};  // empty: steps are small

  static constexpr double most_nodes = 150'000;  // to build: some seconds
};

// None: the step cannot be built. For example, a schedule can require another number of microbatches.
std::optional<std::int64_t> try_change(const Change& change, const PeakOf& peak_of) {
  try {
    return peak_of(change.plan, change.batch);
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::string what_would_fit(const Plan& plan, const BatchSpec& batch, bool trains, std::int64_t needed,
                           const Search& search) {
  const std::int64_t limit = device_limit(plan).bytes;
  std::string least, left_out;
  double built                  = 0;
  const std::vector<Change> all = changes(plan, batch, trains);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Change& change = all[i];
    // Each microbatch has the same nodes; recomputation adds some.
    const double nodes = 1.3 * static_cast<double>(search.num_nodes) * batch.micro / change.batch.micro;
    if (i > 0 && built + nodes * (search.slices ? search.slice_share : 1) > Search::most_nodes) {
      left_out = str("; ", all.size() - i, " settings from ", settings_text(change), " on were not tried");
      break;
    }
    std::optional<std::int64_t> peak;
    if (search.slices) {
      built += nodes * search.slice_share;
      peak = try_change(change, search.slices);
    }
    if (!search.slices || (peak && *peak <= limit)) {
      built += nodes;
      peak = try_change(change, search.whole);
    }
    if (!peak) continue;
    if (*peak <= limit) return str(settings_text(change), " needs ", bytes_and_text(*peak));
    if (*peak < needed) {
      needed = *peak;
      least  = settings_text(change);
    }
  }
  return str(least.empty() ? std::string("no tried setting needs less")
                           : str("of the tried settings ", least, " needs the least, ", bytes_and_text(needed)),
             left_out, "; a larger layout.tp or layout.pp, a shorter batch.seq, or a smaller model");
}

void check_homes_fit(Rank rank, std::int64_t host_bytes, std::int64_t disk_bytes, const OffloadPlan& plan) {
  if (plan.host_bytes > 0 && host_bytes > plan.host_bytes)
    throw Error(ErrorKind::config, str("offload.host_bytes: rank ", rank, " needs ", bytes_and_text(host_bytes),
                                       " of host memory; the budget is ", bytes_and_text(plan.host_bytes), " (",
                                       plan.disk.empty() ? "offload.disk, less in offload, or " : "",
                                       "offload.host_bytes ", host_bytes, ")"));
  if (plan.disk_bytes > 0 && disk_bytes > plan.disk_bytes)
    throw Error(ErrorKind::config, str("offload.disk_bytes: rank ", rank, " needs ", bytes_and_text(disk_bytes),
                                       " on disk; the budget is ", bytes_and_text(plan.disk_bytes),
                                       " (offload.disk_bytes ", disk_bytes, ", or a larger offload.host_bytes)"));
}

void check_homes_fit(const PlannedSizes& sizes, const OffloadPlan& plan) {
  for (const auto& [where, bytes] : sizes.arenas) {
    if (where.second == Space::pinned) check_homes_fit(where.first, bytes, 0, plan);
    if (where.second == Space::disk) check_homes_fit(where.first, 0, bytes, plan);
  }
}

[[noreturn]] void refuse(const MemoryRequirement& needed, const Plan& plan, const std::string& right) {
  const DeviceLimit limit = device_limit(plan);
  throw Error(ErrorKind::config,
              str(limit.key, ": rank ", needed.rank, " needs ", bytes_and_text(needed.peak_bytes), ": ",
                  roles_text(needed), "; the limit is ", bytes_and_text(limit.bytes), " (", right, ")"));
}

}  // namespace

DeviceLimit device_limit(const Plan& plan) {
  const DeviceLimit memory{plan.memory_limit_bytes, "memory.limit_bytes"},
      offload{plan.offload.device_bytes, "offload.device_bytes"};
  if (memory.bytes == 0 || (offload.bytes != 0 && offload.bytes < memory.bytes)) return offload;
  return memory;
}

void check_memory_limit(const StepGraph& step, const Plan& plan, const BuildStep& build,
                        const MemoryRequirementOptions& options) {
  const std::int64_t limit = device_limit(plan).bytes;
  if (limit == 0 && plan.offload.host_bytes == 0 && plan.offload.disk_bytes == 0) return;
  const auto planning = [&](Reuse reuse) {
    return MemoryPlanOptions{.reuse = reuse, .issue_order = options.issue_order, .workspaces = options.workspaces};
  };
  const PlannedSizes sizes = planned_sizes(step.graph, planning(plan.reuse));
  check_homes_fit(sizes, plan.offload);
  const Most most = most_of(step.graph.ranks(), sizes);
  if (limit == 0 || most.bytes <= limit) return;
  constexpr std::uint32_t large = 20'000;  // nodes
  Search search{.num_nodes = step.graph.num_nodes()};
  search.whole = [&](const Plan& by, const BatchSpec& of) {
    const StepGraph other = build(by, of);
    return most_of(other.graph.ranks(), planned_sizes(other.graph, planning(by.reuse), Space::device)).bytes;
  };
  if (step.graph.num_nodes() > large && step.layout.num_ranks() > 1 &&
      static_cast<int>(step.graph.ranks().size()) == step.layout.num_ranks()) {
    search.slices = [&](const Plan& by, const BatchSpec& of) {
      return largest(memory_requirements(step.model, by, of, options)).peak_bytes;
    };
    search.slice_share = 1.0 / step.layout.degree({Axis::dp, Axis::tp});
  }
  refuse(memory_requirement(step, plan_memory(step.graph, planning(plan.reuse)), most.rank), plan,
         what_would_fit(plan, step.batch, options.trains, most.bytes, search));
}

void check_memory_limit(std::span<const MemoryRequirement> requirements, const Model& model, const Plan& plan,
                        const BatchSpec& batch, const MemoryRequirementOptions& options) {
  for (const MemoryRequirement& row : requirements)
    check_homes_fit(row.rank, row.host_bytes, row.disk_bytes, plan.offload);
  const std::int64_t limit      = device_limit(plan).bytes;
  const MemoryRequirement& most = largest(requirements);
  if (limit == 0 || most.peak_bytes <= limit) return;
  Search search;
  for (const MemoryRequirement& row : requirements) search.num_nodes += row.num_nodes;
  search.whole = [&](const Plan& by, const BatchSpec& of) {
    return largest(memory_requirements(model, by, of, options)).peak_bytes;
  };
  refuse(most, plan, what_would_fit(plan, batch, options.trains, most.peak_bytes, search));
}

}  // namespace stepgraph
