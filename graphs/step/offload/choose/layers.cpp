#include "graphs/step/offload/choose/layers.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/size.hpp"
#include "engine/base/text.hpp"
#include "engine/simulate/simulate.hpp"
#include "graphs/layout/layout.hpp"
#include "graphs/step/memory/does_not_fit.hpp"
#include "graphs/step/memory_limit.hpp"
#include "graphs/step/offload/choose/choose.hpp"
#include "graphs/step/offload/choose/fill_device.hpp"

namespace stepgraph {
namespace {

class LayerSearch {
 public:
  explicit LayerSearch(const LayerCase& of) : case_(of) {}

  LayerChoice find() {
    std::optional<LayerCounts> best;
    for (const std::int64_t spare : {case_.spare_bytes, std::int64_t{0}}) {
      target_ = case_.budget_bytes - spare;
      if (!best) best = fastest();
    }
    if (!best) refuse();
    return {.counts = *best, .trial = attempt(*best), .num_trials = static_cast<int>(trials_.size())};
  }

 private:
  // Of those that need at most the target.
  std::optional<LayerCounts> fastest() {
    best_.reset();
    if (fits({})) {
      offer(LayerCounts{});
    } else {
      offer(recomputed_only());
      if (case_.most_offloaded > 0) try_offloaded();
    }
    if (case_.uses_room && best_) try_more_recomputed();
    return best_;
  }

  void offer(const std::optional<LayerCounts>& counts) {
    if (counts && fits(*counts) && (!best_ || attempt(*counts).time_s < attempt(*best_).time_s)) best_ = counts;
  }

  // Time has one minimum in the number of offloaded layers: transfers are hidden up to there.
  void try_offloaded() {
    const int most = offloaded_only();
    offer(with_offloaded(most));
    offer(with_offloaded(most / 2));
    const int between = best_ ? best_->offloaded : most / 2, step = std::max(1, most / 4);
    for (const int next : {between - step, between + step}) {
      if (next > 0 && next < most) offer(with_offloaded(next));
    }
  }

  void try_more_recomputed() {
    const auto [offloaded, from] = *best_;
    const int more               = case_.num_layers - offloaded - from;
    for (int part = 1; part <= 4; ++part) offer(LayerCounts{offloaded, from + more * part / 4});
    const int around = best_->recomputed;
    for (const int next : {around - more / 8, around + more / 8}) {
      if (next >= from && next <= from + more) offer(LayerCounts{offloaded, next});
    }
  }

  const LayerTrial& attempt(const LayerCounts& counts) {
    const auto [found, is_new] = trials_.try_emplace(counts);
    if (is_new) found->second = case_.attempt(counts);
    return found->second;
  }
  bool fits(const LayerCounts& counts) { return attempt(counts).device_bytes <= target_; }

  // The fewest layers with which `counts_of` fits, from 1 to `most`; none does not. Bytes are about linear in them.
  template <class CountsOf>
  std::optional<int> fewest(int most, const CountsOf& counts_of) {
    if (most < 1 || !fits(counts_of(most))) return std::nullopt;
    int too_few = 0, enough = most;
    for (int attempts = 0; enough - too_few > 1 && attempts < 4; ++attempts) {
      const auto above = static_cast<double>(attempt(counts_of(too_few)).device_bytes - target_);
      const auto below = static_cast<double>(target_ - attempt(counts_of(enough)).device_bytes);
      const double at  = too_few + std::ceil((enough - too_few) * above / (above + below));
      const int next   = static_cast<int>(std::clamp<double>(at, too_few + 1, enough - 1));
      (fits(counts_of(next)) ? enough : too_few) = next;
    }
    return enough;
  }

  std::optional<LayerCounts> recomputed_only() {
    const auto found = fewest(case_.num_layers, [](int count) { return LayerCounts{.recomputed = count}; });
    if (!found) return std::nullopt;
    saved_by_one_ =
        static_cast<double>(attempt({}).device_bytes - attempt({.recomputed = *found}).device_bytes) / *found;
    return LayerCounts{.recomputed = *found};
  }

  // The fewest layers that fit where none is recomputed, or as many as may be.
  int offloaded_only() {
    const int most = std::min(case_.most_offloaded, case_.num_layers);
    return fewest(most, [](int count) { return LayerCounts{.offloaded = count}; }).value_or(most);
  }

  std::optional<LayerCounts> with_offloaded(int offloaded) {
    if (offloaded < 1) return std::nullopt;
    LayerCounts counts{.offloaded = offloaded};
    if (fits(counts)) return counts;
    const int most = case_.num_layers - offloaded;
    if (!saved_by_one_) {  // not known, because recomputation alone does not fit
      const auto found = fewest(most, [&](int count) { return LayerCounts{offloaded, count}; });
      return found ? std::optional(LayerCounts{offloaded, *found}) : std::nullopt;
    }
    for (int attempts = 0; attempts < 3 && counts.recomputed < most; ++attempts) {
      const auto above  = static_cast<double>(attempt(counts).device_bytes - target_);
      const double more = *saved_by_one_ > 0 ? std::ceil(above / *saved_by_one_) : 1;
      counts.recomputed = static_cast<int>(std::clamp<double>(counts.recomputed + more, counts.recomputed + 1, most));
      if (fits(counts)) return counts;
    }
    return std::nullopt;
  }

  [[noreturn]] void refuse() {
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    LayerCounts by;
    for (const auto& [counts, trial] : trials_) {
      if (trial.device_bytes < least) {
        least = trial.device_bytes;
        by    = counts;
      }
    }
    throw DoesNotFit(
        case_.budget_key, least,
        str("recompute: auto finds no choice that fits: ", case_.subject, " needs ", bytes_and_text(least),
            " of the device with ", by.offloaded, " layers offloaded and ", by.recomputed, " recomputed of ",
            case_.num_layers, "; ", case_.budget_key, " is ", limit_and_text(case_.budget_bytes)));
  }

  const LayerCase& case_;
  std::int64_t target_ = 0;
  std::optional<LayerCounts> best_;
  std::map<LayerCounts, LayerTrial> trials_;
  std::optional<double> saved_by_one_;  // bytes, by recomputing one layer
};

struct LayerBudget {
  std::int64_t bytes   = 0;
  std::string_view key = {};
};

LayerBudget layer_budget(const Plan& plan, const StepOptions& options) {
  const DeviceLimit limit = device_limit(plan);
  LayerBudget budget{limit.bytes, limit.key};
  if (budget.bytes == 0) {
    constexpr double usable = 0.95;  // the driver and the libraries need some
    budget                  = {static_cast<std::int64_t>(usable * static_cast<double>(options.device_memory_bytes)),
                               "the memory of the device"};
  }
  if (budget.bytes == 0) {
    throw Error(ErrorKind::config,
                "recompute: auto needs the size of the device, which is not known here (memory.limit_bytes or "
                "offload.device_bytes, such as \"16GiB\")");
  }
  return budget;
}

// The layers of which a step has nodes.
std::vector<int> own_layers(const StepGraph& step) {
  std::set<int> found;
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
    const Labels labels = step.graph.labels(Node{i});
    if (labels.layer >= 0 && labels.phase == "forward") found.insert(labels.layer);
  }
  return {found.begin(), found.end()};
}

int most_offloaded(const OffloadPlan& plan, std::size_t layers) {
  if (!plan.may_move(plan.activations)) return 0;
  const double share = plan.strategy == OffloadStrategy::manual ? 1 : most_share(plan.strategy);
  return static_cast<int>(share * static_cast<double>(layers));
}

OffloadAmounts amounts_for(Rank rank, OffloadAmounts amounts, const Plan& plan, const StepOptions& options,
                           const Slices& slices) {
  constexpr std::int64_t parts = 64;
  const LayerBudget budget     = layer_budget(plan, options);
  amounts.activations          = 0;
  amounts.layers               = {};
  std::optional<Machine> usual;
  const Machine* machine = options.simulator;
  if (machine == nullptr) machine = &usual.emplace(device_machine({.ranks = Layout(plan.layout).num_ranks()}));
  const StepGraph without    = slices.build(rank, {});
  const std::vector<int> own = own_layers(without);
  const int num_layers       = without.model.layers;
  LayerCase of{.num_layers     = static_cast<int>(own.size()),
               .most_offloaded = most_offloaded(plan.offload, own.size()),
               .budget_bytes   = budget.bytes,
               .spare_bytes    = Layout(plan.layout).num_ranks() > 1 ? budget.bytes / parts : 0,
               .budget_key     = std::string(budget.key),
               .subject        = str("rank ", rank),
               .uses_room      = fills_device(plan.offload)};
  const auto with = [&](const LayerCounts& counts) {
    OffloadAmounts made = amounts;
    made.layers         = layer_modes(counts, own, num_layers);
    return made;
  };
  const BuildOne build_one = [&](const OffloadAmounts& made) { return slices.build(rank, made); };
  // Without states that stay on the device. None: host memory is too small for that.
  const auto build_plain = [&](const LayerCounts& counts) -> std::optional<StepGraph> {
    try {
      OffloadAmounts least = with(counts);
      least.host_gradients = of.uses_room && may_move_host_gradients(least, options);
      return slices.build(rank, least);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::config || !of.uses_room || plan.offload.host_bytes == 0) throw;
      return std::nullopt;
    }
  };
  const auto time_of = [&](const StepGraph& step, const MemoryPlan& memory) {
    return of.uses_room || options.simulator != nullptr ? simulated_s(step, memory, *machine)
                                                        : simulate({step.graph, memory}, *machine).makespan_s;
  };
  of.attempt = [&](const LayerCounts& counts) -> LayerTrial {
    try {
      const std::optional<StepGraph> plain = build_plain(counts);
      std::int64_t bytes                   = 0;
      if (plain) {
        bytes = planned_device_bytes(*plain, plan, options);
        if (bytes > budget.bytes) return {bytes, 0};
        if (!of.uses_room) return {bytes, time_of(*plain, planned_memory(*plain, plan, options))};
      }
      const StepGraph full    = build_one(filled_device(with(counts), plan, options, build_one));
      const MemoryPlan memory = planned_memory(full, plan, options);
      if (!plain) bytes = memory.device_bytes(rank);
      return {bytes, time_of(full, memory)};
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::config || counts.offloaded == 0) throw;
      return {std::numeric_limits<std::int64_t>::max() / 2, 0};  // the homes have no place
    }
  };
  return with(choose_layers(of).counts);
}

}  // namespace

LayerChoice choose_layers(const LayerCase& of) { return LayerSearch(of).find(); }

std::vector<ActivationMode> layer_modes(const LayerCounts& counts, const std::vector<int>& own, int num_layers) {
  std::vector<ActivationMode> modes(static_cast<std::size_t>(num_layers), ActivationMode::keep);
  for (int i = 0; i < std::ssize(own) && i < counts.offloaded + counts.recomputed; ++i) {
    modes.at(static_cast<std::size_t>(own[static_cast<std::size_t>(i)])) =
        i < counts.offloaded ? ActivationMode::offload : ActivationMode::recompute;
  }
  return modes;
}

std::map<Rank, OffloadAmounts> choose_layers(const Plan& plan, const StepOptions& options, const Slices& slices) {
  const Layout layout(plan.layout);
  const bool is_manual = plan.offload.strategy == OffloadStrategy::manual;
  std::map<Rank, OffloadAmounts> out;
  if (!is_manual) out = choose_amounts(plan, options, slices);
  const auto before = [&](Rank rank) -> OffloadAmounts {
    if (is_manual) return manual_amounts(plan.offload);
    if (const auto found = out.find(rank); found != out.end()) return found->second;
    StepOptions alone = options;
    alone.only        = rank;
    return choose_amounts(plan, alone, slices).at(rank);
  };
  std::map<int, std::vector<ActivationMode>> layers;  // by pipeline rank
  for (const Rank rank : options.only.value_or(RankSet::all(layout.num_ranks()))) {
    const int pp               = layout.coord(rank).pp;
    const auto [found, is_new] = layers.try_emplace(pp);
    const Rank first           = layout.rank({.pp = pp});
    if (is_new) found->second = amounts_for(first, before(first), plan, options, slices).layers;
    OffloadAmounts& amounts = out.try_emplace(rank, manual_amounts(plan.offload)).first->second;
    amounts.activations     = 0;
    amounts.layers          = found->second;
  }
  return out;
}

}  // namespace stepgraph
