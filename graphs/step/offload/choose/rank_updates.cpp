#include <algorithm>

#include "graphs/step/offload/bytes.hpp"
#include "graphs/step/offload/choose/balance.hpp"
#include "graphs/step/offload/choose/rank_choice.hpp"

// Where a rank updates the units whose states are offloaded.
namespace stepgraph::offload {

// The gradients of a unit of the optimizer, where no other unit has a part of them and `grads` does not move them.
const Candidate* RankChoice::own_gradient(const Candidate& unit) const {
  if (!amounts_.host_gradients || moving_gradients_.contains(unit.unit)) return nullptr;
  for (const Candidate& gradient : units_.of(OffloadClass::grads)) {
    if (gradient.unit == unit.unit) return &gradient;
  }
  return nullptr;
}

void RankChoice::choose_host_gradients() {
  for (const Updated& unit : updated_) {
    const Candidate* const gradient = unit.on_host ? own_gradient(*unit.of) : nullptr;
    if (gradient != nullptr)
      chosen_.push_back({.offload_class = OffloadClass::grads, .of = gradient, .moves_once = true});
  }
}

UpdateUnit RankChoice::update_unit(const Candidate& unit) const {
  UpdateUnit made{.name = unit.unit, .state_bytes = unit.bytes};
  const auto is_of = [&](const StoredRange& range) {
    return std::find(unit.buffers.begin(), unit.buffers.end(), range.buffer) != unit.buffers.end();
  };
  const auto gradient = moving_gradients_.find(unit.unit);
  // In an early update a gradient that moves is still on the device.
  const bool gradient_moves = gradient != moving_gradients_.end() && !made_.early_updates;
  const bool moves_before   = own_gradient(unit) != nullptr;  // during the backward pass
  for (const StepWeight& weight : step_.ranks.at(rank_).weights) {
    if (weight.first.empty() || !is_of(weight.first)) continue;
    made.elements += weight.first.size();
    const auto bytes_of = [&](const StoredRange& range) {
      return weight.first.size() * static_cast<std::int64_t>(size_bytes(step_.graph.spec(range.buffer).type));
    };
    if (!moves_before) (gradient_moves ? made.home_bytes : made.gradient_bytes) += bytes_of(weight.gradient);
    if (share(OffloadClass::params) == 0) made.value_bytes += bytes_of(weight.value);
  }
  return made;
}

// Decides which offloaded units the host should update, so that link, host and device end together.
void RankChoice::divide_updates() {
  for (const Chosen& unit : chosen_) {
    if (unit.offload_class == OffloadClass::optimizer) updated_.push_back({.of = unit.of});
  }
  if (!rates_) {
    const std::vector<bool> on_host = evenly_spread(updated_.size(), amounts_.host_updates);
    for (std::size_t i = 0; i < updated_.size(); ++i) updated_[i].on_host = on_host[i];
    return;
  }
  std::vector<UpdateUnit> units;
  for (const Updated& unit : updated_) units.push_back(update_unit(*unit.of));
  OffloadRates rates = *rates_;
  rates.host_elements_per_s *= amounts_.host_scale;
  const UpdateBalance balance = balance_updates(units, rates, {.gradients = amounts_.gradient_bytes});
  for (std::size_t i = 0; i < updated_.size(); ++i) {
    updated_[i].on_host = balance.modes[i] == UpdateMode::host;
    if (balance.keeps_gradient[i]) gradients_that_stay_.insert(updated_[i].of->unit);
  }
}

std::optional<std::int64_t> RankChoice::staging_of(const Candidate& unit) const {
  constexpr std::int64_t padding       = 512;  // in a slot
  std::int64_t sum                     = 0;
  const std::set<std::uint32_t> states = [&] {
    std::set<std::uint32_t> ids;
    for (const Buffer buffer : unit.buffers) ids.insert(buffer.id);
    return ids;
  }();
  for (const Buffer buffer : unit.buffers) {
    if (!pinned_.at(buffer.id)) return std::nullopt;
    if (effective(kind_of(buffer), step_.graph.spec(buffer).type) != Compression::none)
      sum += plan_.slots * pinned_bytes(step_.graph.spec(buffer).size_bytes + padding);
  }
  for (const StepWeight& weight : step_.ranks.at(rank_).weights) {
    if (weight.first.empty() || !states.contains(weight.first.buffer.id)) continue;
    for (const StoredRange* range : {&weight.gradient, &weight.value}) {
      const auto home = pinned_.find(range->buffer.id);
      if (home != pinned_.end() && !home->second) return std::nullopt;  // on disk
      const DType type  = step_.graph.spec(range->buffer).type;
      const bool direct = home != pinned_.end() && effective(kind_of(range->buffer), type) == Compression::none;
      if (!direct) sum += pinned_bytes(weight.first.size() * static_cast<std::int64_t>(size_bytes(type)) + padding);
    }
  }
  return sum;
}

void RankChoice::choose_updates() {
  for (const Updated& unit : updated_) {
    UpdateMode mode    = UpdateMode::streamed;
    const auto staging = unit.on_host ? staging_of(*unit.of) : std::nullopt;
    if (staging && (*staging == 0 || *staging <= host_left_)) {
      host_left_ -= *staging;
      demand_.host_bytes += *staging;
      demand_.shared_bytes += *staging;
      mode = UpdateMode::host;
    }
    made_.updates.push_back({.rank = rank_, .unit = unit.of->unit, .mode = mode});
  }
}

}  // namespace stepgraph::offload
