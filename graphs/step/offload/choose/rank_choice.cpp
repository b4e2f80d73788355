#include "graphs/step/offload/choose/rank_choice.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "engine/base/error.hpp"
#include "engine/base/size.hpp"
#include "engine/base/text.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/run/storage.hpp"
#include "graphs/step/memory/does_not_fit.hpp"
#include "graphs/step/offload/bytes.hpp"

namespace stepgraph::offload {
namespace {

constexpr std::int64_t scalar_bytes = Storage::block_bytes;  // of the copies of scalars that the host reads
// In the order in which they get host memory.
constexpr std::array by_benefit{OffloadClass::params, OffloadClass::grads, OffloadClass::activations,
                                OffloadClass::optimizer};

}  // namespace

std::vector<bool> evenly_spread(std::size_t count, double share) {
  const auto wanted = static_cast<std::size_t>(
      std::clamp(std::ceil(share * static_cast<double>(count) - 1e-9), 0.0, static_cast<double>(count)));
  std::vector<bool> chosen(count);
  for (std::size_t i = 0; i < count; ++i) chosen[i] = (i + 1) * wanted / count > i * wanted / count;
  return chosen;
}

std::int64_t pinned_bytes(std::int64_t size) {
  return rounded_up(size, size >= MemoryPlan::block_alignment ? MemoryPlan::block_alignment : MemoryPlan::alignment);
}

RankChoice::RankChoice(const StepGraph& step, const OffloadPlan& plan, const OffloadAmounts& amounts,
                       const std::optional<OffloadRates>& rates, const RankUnits& units, Rank rank, HomePlan& made)
    : step_(step), plan_(plan), amounts_(amounts), rates_(rates), units_(units), rank_(rank), made_(made) {}

HomeDemand RankChoice::choose(std::int64_t room_bytes) {
  find_moving_gradients();
  choose_units(OffloadClass::optimizer);
  divide_updates();
  for (const OffloadClass of : {OffloadClass::params, OffloadClass::grads, OffloadClass::activations}) choose_units(of);
  choose_host_gradients();
  if (chosen_.empty()) return demand_;  // no host memory is needed
  const auto benefit = [](const Chosen& unit) {
    return std::find(by_benefit.begin(), by_benefit.end(), unit.offload_class);
  };
  std::ranges::stable_sort(chosen_, {}, benefit);
  const bool is_limited   = plan_.host_bytes > 0;
  const bool may_use_disk = is_limited && !plan_.disk.empty();
  const bool uses_ring    = may_use_disk || plan_.compress == Compression::lossless;
  demand_.homes_bytes     = scalar_bytes + (uses_ring ? made_.num_pieces * made_.piece_bytes : 0);
  if (is_limited && demand_.homes_bytes > plan_.host_bytes)
    refuse_host_bytes(rank_, made_.num_pieces * Storage::block_bytes + scalar_bytes, "staging", plan_);
  host_left_ = is_limited ? room_bytes - demand_.homes_bytes : no_limit;
  std::vector<Space> spaces(chosen_.size());
  std::int64_t persistent_left = plan_.host_bytes - demand_.homes_bytes;
  for (const std::size_t i : order_of_rooms()) {
    const std::int64_t bytes      = host_bytes_of(chosen_[i]);
    const std::int64_t persistent = bytes - host_bytes_of(chosen_[i], Lifetime::step);
    const bool fits               = !may_use_disk || (bytes <= host_left_ && persistent <= persistent_left);
    if (fits) {
      host_left_ -= bytes;
      persistent_left -= persistent;
    }
    spaces[i] = fits ? Space::pinned : Space::disk;
  }
  for (std::size_t i = 0; i < chosen_.size(); ++i) place(chosen_[i], spaces[i]);
  demand_.host_bytes = demand_.homes_bytes;
  choose_updates();
  return demand_;
}

// The order in which chosen units get host memory. The activations of one layer in all microbatches come together,
// because they can share memory.
std::vector<std::size_t> RankChoice::order_of_rooms() const {
  std::map<std::string, std::size_t> layers;  // by name: their first unit
  std::vector<std::size_t> groups;            // by unit
  for (std::size_t i = 0; i < chosen_.size(); ++i) {
    const std::string& name = chosen_[i].of->unit;
    const bool shares       = chosen_[i].offload_class == OffloadClass::activations;
    groups.push_back(shares ? layers.try_emplace(name.substr(0, name.find(" mb")), i).first->second : i);
  }
  std::vector<std::size_t> order(chosen_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return groups[a] < groups[b]; });
  return order;
}

void RankChoice::place(const Chosen& unit, Space space) {
  for (const Buffer buffer : unit.of->buffers) {
    const std::int64_t bytes = pinned_bytes(stored_bytes(buffer));
    if (space == Space::pinned) {
      demand_.homes_bytes += bytes;
      if (step_.graph.spec(buffer).lifetime == Lifetime::step) demand_.shared_bytes += bytes;
    } else {
      demand_.disk_bytes += rounded_up(stored_bytes(buffer), Storage::block_bytes);
    }
    pinned_[buffer.id] = space == Space::pinned;
    made_.homes.push_back({.buffer      = buffer,
                           .of          = unit.offload_class,
                           .unit        = unit.of->unit,
                           .space       = space,
                           .compression = kind_of(buffer),
                           .moves_once  = unit.moves_once});
  }
}

double RankChoice::share(OffloadClass of) const {
  switch (of) {
    case OffloadClass::params:
      return amounts_.params;
    case OffloadClass::grads:
      return amounts_.grads;
    case OffloadClass::optimizer:
      return amounts_.optimizer;
    case OffloadClass::activations:
      break;
  }
  return amounts_.activations;
}

// The activations that OffloadAmounts::layers moves, and a share of those outside of layers.
std::vector<bool> RankChoice::by_layer(const std::vector<Candidate>& all) const {
  const auto is_outside   = [](const Candidate& unit) { return unit.layer < 0; };
  const auto num_outside  = static_cast<std::size_t>(std::count_if(all.begin(), all.end(), is_outside));
  const auto from_outside = evenly_spread(num_outside, amounts_.activations);
  std::vector<bool> moves;
  std::size_t outside = 0;
  for (const Candidate& unit : all) {
    moves.push_back(is_outside(unit)
                        ? from_outside[outside++]
                        : amounts_.layers.at(static_cast<std::size_t>(unit.layer)) == ActivationMode::offload);
  }
  return moves;
}

void RankChoice::choose_units(OffloadClass of) {
  const std::vector<Candidate>& all = units_.of(of);
  const std::vector<bool> moves     = of == OffloadClass::activations && !amounts_.layers.empty()
                                          ? by_layer(all)
                                          : evenly_spread(all.size(), share(of));
  std::int64_t stays                = of == OffloadClass::params      ? plan_.device_param_bytes
                                      : of == OffloadClass::optimizer ? amounts_.resident_bytes
                                                                      : 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!moves[i] || (of == OffloadClass::grads && gradients_that_stay_.contains(all[i].unit))) continue;
    const auto gradient = moving_gradients_.find(all[i].unit);
    // Until an early update the gradient is on the device anyway.
    const bool with_gradient =
        of == OffloadClass::optimizer && gradient != moving_gradients_.end() && !made_.early_updates;
    const std::int64_t bytes = all[i].bytes + (with_gradient ? gradient->second->bytes : 0);
    if (bytes <= stays) {
      stays -= bytes;
      if (with_gradient) gradients_that_stay_.insert(all[i].unit);
      continue;
    }
    if (of == OffloadClass::optimizer) stays = 0;  // without gaps: the next step needs the first units first
    chosen_.push_back({of, &all[i]});
  }
}

void RankChoice::find_moving_gradients() {
  const std::vector<Candidate>& all = units_.of(OffloadClass::grads);
  const std::vector<bool> moves     = evenly_spread(all.size(), share(OffloadClass::grads));
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (moves[i]) moving_gradients_.emplace(all[i].unit, &all[i]);
  }
}

Compression RankChoice::kind_of(Buffer buffer) const {
  const bool keeps_bits = units_.with_copies.contains(buffer.id) || units_.masters.contains(buffer.id);
  return keeps_bits && is_lossy(plan_.compress, step_.graph.spec(buffer).type) ? Compression::none : plan_.compress;
}

std::int64_t RankChoice::stored_bytes(Buffer buffer) const {
  const BufferSpec& spec = step_.graph.spec(buffer);
  return stepgraph::stored_bytes(home_format(spec.type,
                                             spec.size_bytes / static_cast<std::int64_t>(size_bytes(spec.type)),
                                             Space::pinned, kind_of(buffer), made_.piece_bytes));
}

std::int64_t RankChoice::host_bytes_of(const Chosen& unit, std::optional<Lifetime> lifetime) const {
  std::int64_t sum = 0;
  for (const Buffer buffer : unit.of->buffers) {
    if (!lifetime || step_.graph.spec(buffer).lifetime == *lifetime) sum += pinned_bytes(stored_bytes(buffer));
  }
  return sum;
}

void refuse_host_bytes(Rank rank, std::int64_t needed, std::string_view what, const OffloadPlan& plan) {
  throw DoesNotFit("offload.host_bytes", needed,
                   str("offload.host_bytes: rank ", rank, " needs at least ", bytes_and_text(needed),
                       " of host memory for ", what, "; the budget is ", limit_and_text(plan.host_bytes)));
}

}  // namespace stepgraph::offload
