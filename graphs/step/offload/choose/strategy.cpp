#include "graphs/step/offload/choose/strategy.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/size.hpp"
#include "engine/base/text.hpp"
#include "engine/plan/memory_peak.hpp"
#include "graphs/layout/layout.hpp"
#include "graphs/step/memory/does_not_fit.hpp"
#include "graphs/step/offload/choose/choose.hpp"
#include "graphs/step/offload/choose/fill_device.hpp"

namespace stepgraph {
namespace {

constexpr std::array move_order{OffloadClass::optimizer, OffloadClass::grads, OffloadClass::params,
                                OffloadClass::activations};

double& amount(OffloadAmounts& amounts, OffloadClass of) {
  switch (of) {
    case OffloadClass::optimizer:
      return amounts.optimizer;
    case OffloadClass::grads:
      return amounts.grads;
    case OffloadClass::params:
      return amounts.params;
    case OffloadClass::activations:
      break;
  }
  return amounts.activations;
}

// The first `count` units in the order of the case; memory plans are kept.
class UnitSearch {
 public:
  explicit UnitSearch(const StrategyCase& of) : case_(of) {
    for (const int units : of.units) num_units_ += units;
  }

  [[nodiscard]] OffloadAmounts amounts(int count) const {
    OffloadAmounts out;
    for (std::size_t i = 0; i < move_order.size(); ++i) {
      const int moved = std::min(count, case_.units[i]);
      if (moved > 0) amount(out, move_order[i]) = static_cast<double>(moved) / case_.units[i];
      count -= moved;
    }
    return out;
  }
  [[nodiscard]] std::int64_t bytes(int count) {
    const auto [found, is_new] = bytes_.try_emplace(count, 0);
    if (is_new) found->second = case_.device_bytes(amounts(count));
    return found->second;
  }
  // The most units that a strategy may move and that have a place.
  [[nodiscard]] int most(OffloadStrategy strategy) const { return most(strategy, case_.moved_share); }
  // Whether it might move more if there were more host memory.
  [[nodiscard]] bool lacks_host(OffloadStrategy strategy) const {
    return case_.unlimited_share && most(strategy, case_.unlimited_share) > most(strategy);
  }
  // The fewest units with which the step needs at most `target` bytes. They are at most `most`, which does.
  [[nodiscard]] int fewest(std::int64_t target, int most) {
    int needs_more = 0, enough = most;
    while (enough - needs_more > 1) {
      const int middle                                = needs_more + (enough - needs_more) / 2;
      (bytes(middle) <= target ? enough : needs_more) = middle;
    }
    return enough;
  }

 private:
  [[nodiscard]] int most(OffloadStrategy strategy, const auto& share) const {
    return last_true([&](int count) { return share(amounts(count)) <= most_share(strategy) + 1e-9; });
  }
  template <class Holds>
  [[nodiscard]] int last_true(const Holds& holds) const {
    if (holds(num_units_)) return num_units_;
    int yes = 0, no = num_units_;
    while (no - yes > 1) {
      const int middle           = yes + (no - yes) / 2;
      (holds(middle) ? yes : no) = middle;
    }
    return yes;
  }

  const StrategyCase& case_;
  int num_units_ = 0;
  std::map<int, std::int64_t> bytes_;  // by count
};

std::string share_text(OffloadStrategy strategy) {
  return most_share(strategy) < 1 ? str("moves at most ", most_share(strategy)) : std::string("can move all");
}

struct Budget {
  std::int64_t bytes = 0;
  std::string key    = {};
};
Budget budget_of(const Plan& plan, const StepOptions& options) {
  Budget budget{plan.offload.device_bytes, "offload.device_bytes"};
  if (budget.bytes == 0) budget = {options.device_memory_bytes, "the memory of the device"};
  if (budget.bytes == 0) {
    throw Error(ErrorKind::config, str("offload.strategy: ", plan.offload.strategy,
                                       " needs the size of the device, which is not known here (offload.device_bytes, "
                                       "such as \"16GiB\")"));
  }
  if (plan.memory_limit_bytes > 0 && plan.memory_limit_bytes < budget.bytes)
    budget = {plan.memory_limit_bytes, "memory.limit_bytes"};
  return budget;
}

// All that may be moved, whether it has a place or not.
OffloadAmounts all_amounts(const OffloadPlan& plan, bool chooses_layers) {
  const auto share = [&](bool field) { return plan.may_move(field) ? 1.0 : 0.0; };
  return {.optimizer   = share(plan.optimizer),
          .grads       = share(plan.grads),
          .params      = share(plan.params),
          .activations = chooses_layers ? 0 : share(plan.activations)};
}

// The bytes of units as they count for a share. Activations of many microbatches share memory: all of them together
// count as much as those that are on the device at its peak.
class Weighing {
 public:
  Weighing(const StepGraph& without, const MemoryPlan& memory, Rank rank, const HomePlan& all) {
    std::set<std::uint32_t> alive;
    for (const Buffer buffer : memory_peak(without.graph, memory, rank).alive) alive.insert(buffer.id);
    std::int64_t at_peak = 0, in_all = 0;
    for (const Home& home : all.homes) {
      if (home.of != OffloadClass::activations) continue;
      const std::int64_t bytes = without.graph.spec(home.buffer).size_bytes;
      in_all += bytes;
      if (alive.contains(home.buffer.id)) at_peak += bytes;
    }
    if (in_all > 0) activations_ = static_cast<double>(at_peak) / static_cast<double>(in_all);
  }
  [[nodiscard]] double bytes(const std::vector<OffloadedUnit>& units) const {
    double sum = 0;
    for (const OffloadedUnit& unit : units)
      sum += static_cast<double>(unit.bytes) * (unit.of == OffloadClass::activations ? activations_ : 1);
    return sum;
  }

 private:
  double activations_ = 1;
};

StrategyChoice choose_for(Rank rank, const Plan& plan, const StepOptions& options, const Slices& slices) {
  const StepGraph without      = slices.build(rank, {});
  const Budget budget          = budget_of(plan, options);
  const MemoryPlan memory      = planned_memory(without, plan, options);
  Plan unlimited               = plan;
  unlimited.offload.host_bytes = unlimited.offload.disk_bytes = 0;
  StrategyCase of{
      .plan = plan.offload, .subject = str("rank ", rank), .budget_bytes = budget.bytes, .budget_key = budget.key};
  of.layers_follow = plan.recompute == Recompute::automatic;
  offload::StepUnits known;
  const HomePlan all = choose_homes(without, unlimited, all_amounts(plan.offload, of.layers_follow), {}, &known);
  const std::vector<OffloadedUnit> units = offloaded_units(without.graph, all);
  for (const OffloadedUnit& unit : units) {
    const auto place = std::find(move_order.begin(), move_order.end(), unit.of) - move_order.begin();
    ++of.units[static_cast<std::size_t>(place)];
  }
  const Weighing weighing(without, memory, rank, all);
  const double all_bytes = weighing.bytes(units);
  of.moved_share         = [&](const OffloadAmounts& amounts) {
    try {
      const double moved =
          weighing.bytes(offloaded_units(without.graph, choose_homes(without, plan, amounts, options, &known)));
      return all_bytes > 0 ? moved / all_bytes : 0.0;
    } catch (const Error&) {
      return 2.0;
    }
  };
  if (plan.offload.host_bytes > 0) {
    of.unlimited_share = [&](const OffloadAmounts& amounts) {
      const auto moved = offloaded_units(without.graph, choose_homes(without, unlimited, amounts, options, &known));
      return all_bytes > 0 ? weighing.bytes(moved) / all_bytes : 0.0;
    };
  }
  of.device_bytes = [&](const OffloadAmounts& amounts) {
    if (amounts == OffloadAmounts{}) return memory.device_bytes(rank);
    return planned_device_bytes(slices.build(rank, amounts), plan, options);
  };
  return choose_amounts(of);
}

// All processes choose for the first of ranks that are alike, also those that do not hold it, so that they choose what
// a process with all ranks would.
std::map<Rank, OffloadAmounts> for_all_ranks(const Plan& plan, const StepOptions& options, const Slices& slices,
                                             const auto& choose) {
  std::map<Rank, OffloadAmounts> choices;  // by the rank that chooses
  std::map<Rank, OffloadAmounts> out;
  for (const Rank rank : options.only.value_or(RankSet::all(Layout(plan.layout).num_ranks()))) {
    const auto [found, is_new] = choices.try_emplace(slices.first_like(rank));
    if (is_new) found->second = choose(found->first, rank);
    out[rank] = found->second;
  }
  return out;
}

}  // namespace

StrategyChoice choose_amounts(const StrategyCase& of) {
  UnitSearch search(of);
  const OffloadStrategy strategy = of.plan.strategy;
  const auto target = static_cast<std::int64_t>(pressure_threshold(strategy) * static_cast<double>(of.budget_bytes));
  StrategyChoice out{.device_bytes = search.bytes(0), .bytes_before = search.bytes(0)};
  if (out.bytes_before <= target) return out;
  const int most = search.most(strategy);
  int count      = search.bytes(most) < out.bytes_before ? most : 0;
  if (search.bytes(count) > of.budget_bytes && !of.layers_follow) {
    const std::string host =
        search.lacks_host(strategy)
            ? str(", and offload.host_bytes ", limit_and_text(of.plan.host_bytes),
                  of.plan.disk_bytes > 0 ? str(" with offload.disk_bytes ", limit_and_text(of.plan.disk_bytes)) : "",
                  " has room for less of it")
            : std::string();
    throw DoesNotFit(
        of.budget_key, search.bytes(count),
        str("offload.strategy: ", strategy, " ", share_text(strategy), " of what may be offloaded", host,
            host.empty() ? ", and " : ": ", of.subject, " then needs ", bytes_and_text(search.bytes(count)),
            " of the device; ", of.budget_key, " is ", limit_and_text(of.budget_bytes)));
  }
  if (count > 0 && search.bytes(count) <= target) count = search.fewest(target, count);
  out.amounts      = search.amounts(count);
  out.device_bytes = search.bytes(count);
  out.moved_share  = of.moved_share(out.amounts);
  return out;
}

std::map<Rank, OffloadAmounts> choose_amounts(const Plan& plan, const StepOptions& options, const Slices& slices) {
  return for_all_ranks(plan, options, slices,
                       [&](Rank first, Rank) { return choose_for(first, plan, options, slices).amounts; });
}

std::map<Rank, OffloadAmounts> choose_nothing(const Plan& plan, const StepOptions& options, const Slices& slices) {
  std::map<Rank, OffloadAmounts> out;
  if (!stays_if_it_fits(plan.offload)) return out;
  const Layout layout(plan.layout);
  std::map<int, bool> fits;  // by pipeline rank
  for (const Rank rank : options.only.value_or(RankSet::all(layout.num_ranks()))) {
    const int pp               = layout.coord(rank).pp;
    const auto [found, is_new] = fits.try_emplace(pp);
    if (is_new) {
      const StepGraph without = slices.build(layout.rank({.pp = pp}), {});
      found->second           = planned_device_bytes(without, plan, options) <= budget_to_fill(plan);
    }
    if (found->second) out[rank] = {};
  }
  return out;
}

std::map<Rank, OffloadAmounts> keep_residents(const Plan& plan, const StepOptions& options, const Slices& slices) {
  return for_all_ranks(plan, options, slices, [&](Rank first, Rank rank) {
    const auto own = options.offload_of.find(rank);
    return fill_device(own == options.offload_of.end() ? manual_amounts(plan.offload) : own->second, plan, options,
                       [&](const OffloadAmounts& amounts) { return slices.build(first, amounts); });
  });
}

}  // namespace stepgraph
