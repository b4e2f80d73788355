#include "graphs/step/offload/choose/choose.hpp"

#include <algorithm>
#include <optional>
#include <tuple>

#include "engine/base/error.hpp"
#include "engine/base/size.hpp"
#include "engine/base/text.hpp"
#include "engine/plan/planned_sizes.hpp"
#include "engine/run/storage.hpp"
#include "graphs/step/memory/does_not_fit.hpp"
#include "graphs/step/offload/choose/rank_choice.hpp"

namespace stepgraph {
namespace {

using offload::HomeDemand;
using offload::RankChoice;

constexpr std::int64_t most_piece_bytes = std::int64_t{8} << 20;

// Whether a unit can get a home. Most steps move none; then the search for units is skipped.
bool moves_units(const OffloadAmounts& amounts) {
  return amounts.optimizer > 0 || amounts.grads > 0 || amounts.params > 0 || amounts.activations > 0 ||
         std::ranges::count(amounts.layers, ActivationMode::offload) > 0;
}

// Finds the homes of all ranks. Homes that last for a part of the step share host memory, as the memory plan says.
// So a rank gets a room, which is the sum of its homes in host memory, and the room is made larger than host_bytes as
// long as the planned bytes fit.
class HomeSearch {
 public:
  HomeSearch(const StepGraph& step, const Plan& plan, const OffloadAmounts& amounts, const StepOptions& options,
             offload::StepUnits& units)
      : step_(step), plan_(plan), amounts_(amounts), options_(options), units_(units) {
    for (const Rank rank : step.graph.ranks()) rooms_[rank].bytes = RankChoice::no_limit;
  }

  HomePlan find() {
    HomePlan made = choose();
    if (plan_.offload.host_bytes == 0 || !limit_rooms()) return checked(std::move(made));
    try_all(choose());
    if (!has_disk()) try_least();
    for (int attempt = 0; attempt < 5 && is_open(); ++attempt) try_between();
    for (auto& [rank, room] : rooms_) {
      if (room.open) room.bytes = room.low;
      room.open = false;
    }
    made = choose();
    if (rooms_.size() > 1) made = fit_together(std::move(made));
    return checked(std::move(made));
  }

 private:
  struct Room {
    std::int64_t bytes = 0;
    // While it is open: the largest room that is known to fit, and the smallest that is known not to.
    std::int64_t low = 0, high = 0;
    bool open     = false;
    bool is_short = false;  // not all homes and staging fit, if they share no bytes
    HomeDemand demand;
  };

  [[nodiscard]] bool has_disk() const { return !plan_.offload.disk.empty(); }
  [[nodiscard]] bool is_open() const {
    return std::any_of(rooms_.begin(), rooms_.end(), [](const auto& each) { return each.second.open; });
  }

  HomePlan choose() {
    const OffloadPlan& of = plan_.offload;
    HomePlan made{.slots         = of.slots,
                  .async         = of.async,
                  .early_updates = updates_early(plan_) && !step_.update_first,
                  .piece_bytes   = most_piece_bytes};
    if (of.host_bytes > 0) {  // the ring takes at most a quarter
      const std::int64_t piece = of.host_bytes / (4 * made.num_pieces) / Storage::block_bytes * Storage::block_bytes;
      made.piece_bytes         = std::clamp(piece, Storage::block_bytes, most_piece_bytes);
    }
    for (auto& [rank, room] : rooms_) {
      const auto own                = options_.offload_of.find(rank);
      const OffloadAmounts& amounts = own == options_.offload_of.end() ? amounts_ : own->second;
      const offload::RankUnits& all = moves_units(amounts) ? units_.of(step_, rank) : no_units_;
      RankChoice choice(step_, of, amounts, options_.offload_rates, all, rank, made);
      room.demand = choice.choose(room.bytes);
      made.shares_staging |= room.is_short;
    }
    return made;
  }

  // Opens the rooms of ranks for which all homes together are more than host_bytes. False: there are none.
  bool limit_rooms() {
    const std::int64_t budget = plan_.offload.host_bytes;
    for (auto& [rank, room] : rooms_) {
      room.open = room.is_short = room.demand.host_bytes > budget;
      room.low                  = has_disk() ? budget : room.demand.homes_bytes;
      room.high =
          has_disk() ? std::min(room.demand.host_bytes, budget + room.demand.shared_bytes) : room.demand.host_bytes;
    }
    return is_open();
  }

  // The planned bytes of a rank in host memory or on disk, by its own slice, as a process with this rank alone plans
  // them.
  [[nodiscard]] std::int64_t planned_bytes(const Graph& graph, Rank rank, Space space = Space::pinned) const {
    const Graph own = graph.ranks() == RankSet(rank) ? graph : slice(graph, rank);
    return planned_sizes(own, planning(), space).arena(rank, space);
  }
  [[nodiscard]] MemoryPlanOptions planning() const {
    return {.reuse = plan_.reuse, .issue_order = options_.issue_order, .workspaces = options_.workspaces};
  }

  void try_all(const HomePlan& all) {
    const auto may_fit = [&](const Room& room) {
      return room.open && room.demand.host_bytes - room.demand.shared_bytes <= plan_.offload.host_bytes;
    };
    if (std::none_of(rooms_.begin(), rooms_.end(), [&](const auto& each) { return may_fit(each.second); })) return;
    const Graph graph = with_homes(step_.graph, all).graph;
    for (auto& [rank, room] : rooms_) {
      if (may_fit(room)) room.open = planned_bytes(graph, rank) > plan_.offload.host_bytes;
    }
  }

  // Without a disk all homes must fit, at least if no update runs on the host.
  void try_least() {
    if (!is_open()) return;
    for (auto& [rank, room] : rooms_) {
      if (room.open) room.bytes = room.low;
    }
    const Graph graph = with_homes(step_.graph, choose()).graph;
    for (const auto& [rank, room] : rooms_) {
      if (!room.open) continue;
      const std::int64_t needed = planned_bytes(graph, rank);
      if (needed > plan_.offload.host_bytes) offload::refuse_host_bytes(rank, needed, "homes", plan_.offload);
    }
  }

  void try_between() {
    constexpr std::int64_t parts = 64;  // a room is exact to this part of the budget
    bool any                     = false;
    for (auto& [rank, room] : rooms_) {
      if (!room.open) continue;
      room.open  = room.high - room.low > plan_.offload.host_bytes / parts;
      room.bytes = room.open ? room.low + (room.high - room.low) / 2 : room.low;
      any |= room.open;
    }
    if (!any) return;
    const Graph graph = with_homes(step_.graph, choose()).graph;
    for (auto& [rank, room] : rooms_) {
      if (room.open) (planned_bytes(graph, rank) <= plan_.offload.host_bytes ? room.low : room.high) = room.bytes;
    }
  }

  // The plan of all ranks can need a little more than the plans of their slices. Then homes share no bytes; without a
  // disk, no update runs on the host.
  HomePlan fit_together(HomePlan made) {
    const PlannedSizes planned = planned_sizes(with_homes(step_.graph, made).graph, planning(), Space::pinned);
    bool fits                  = true;
    for (auto& [rank, room] : rooms_) {
      if (planned.arena(rank, Space::pinned) <= plan_.offload.host_bytes) continue;
      room.bytes = has_disk() ? plan_.offload.host_bytes : room.demand.homes_bytes;
      fits       = false;
    }
    return fits ? std::move(made) : choose();
  }

  HomePlan checked(HomePlan made) const {
    const std::int64_t budget = plan_.offload.disk_bytes;
    if (budget == 0) return made;
    std::optional<Graph> graph;
    for (const auto& [rank, room] : rooms_) {
      if (room.demand.disk_bytes <= budget) continue;  // even if no homes share bytes
      if (!graph) graph = with_homes(step_.graph, made).graph;
      const std::int64_t needed = planned_bytes(*graph, rank, Space::disk);
      if (needed <= budget) continue;
      throw DoesNotFit("offload.disk_bytes", needed,
                       str("offload.disk_bytes: rank ", rank, " needs ", bytes_and_text(needed),
                           " on disk; the budget is ", limit_and_text(budget)));
    }
    return made;
  }

  const StepGraph& step_;
  const Plan& plan_;
  const OffloadAmounts& amounts_;
  const StepOptions& options_;
  offload::StepUnits& units_;
  const offload::RankUnits no_units_ = {};
  std::map<Rank, Room> rooms_;
};

}  // namespace

bool updates_early(const Plan& plan) noexcept {
  return plan.offload.overlaps_updates() && plan.optimizer.clip == 0 && !plan.precision.scales() &&
         !plan.update.delays();
}

OffloadAmounts manual_amounts(const OffloadPlan& plan) noexcept {
  if (plan.strategy != OffloadStrategy::manual) return {};
  return {.optimizer   = plan.optimizer ? 1.0 : 0.0,
          .grads       = plan.grads ? 1.0 : 0.0,
          .params      = plan.params ? 1.0 : 0.0,
          .activations = plan.activations ? 1.0 : 0.0};
}

HomePlan choose_homes(const StepGraph& step, const Plan& plan, const OffloadAmounts& amounts,
                      const StepOptions& options, offload::StepUnits* known) {
  offload::StepUnits own;
  return HomeSearch(step, plan, amounts, options, known == nullptr ? own : *known).find();
}

std::vector<OffloadedUnit> offloaded_units(const Graph& before, const HomePlan& homes) {
  std::map<std::pair<Rank, std::string>, UpdateMode> modes;
  for (const UnitUpdate& update : homes.updates) modes[{update.rank, update.unit}] = update.mode;
  std::vector<OffloadedUnit> units;
  std::map<std::tuple<Rank, OffloadClass, std::string>, std::size_t> numbers;
  for (const Home& home : homes.homes) {
    const BufferSpec& spec    = before.spec(home.buffer);
    const auto [unit, is_new] = numbers.try_emplace({spec.rank, home.of, home.unit}, units.size());
    if (is_new) {
      units.push_back({.rank = spec.rank, .of = home.of, .unit = home.unit, .space = home.space});
      if (home.of == OffloadClass::optimizer) {
        const auto mode     = modes.find({spec.rank, home.unit});
        units.back().update = mode == modes.end() ? UpdateMode::streamed : mode->second;
      }
    }
    OffloadedUnit& made = units[unit->second];
    made.bytes += spec.size_bytes;
    if (home.space == Space::disk) made.space = Space::disk;
    if (const Compression used = effective(home.compression, spec.type); used != Compression::none)
      made.compression = used;
  }
  return units;
}

}  // namespace stepgraph
