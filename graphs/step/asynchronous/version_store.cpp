#include "graphs/step/asynchronous/version_store.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "engine/base/error.hpp"
#include "ops/updates/apply_update.hpp"

namespace stepgraph {
namespace {

// Calls a function when it goes out of scope.
template <class F>
class AtEnd {
 public:
  explicit AtEnd(F f) : f_(std::move(f)) {}
  ~AtEnd() { f_(); }
  AtEnd(const AtEnd&)            = delete;
  AtEnd& operator=(const AtEnd&) = delete;

 private:
  F f_;
};

}  // namespace

VersionStore::VersionStore(Spec spec)
    : spec_(std::move(spec)),
      places_(spec_.weights.size()),
      pins_(static_cast<std::size_t>(num_slots(spec_.num_ranks)), 0),
      done_(static_cast<std::size_t>(spec_.num_ranks), 0) {}

void VersionStore::open(std::size_t weight, Places places) { places_[weight] = std::move(places); }

// A run that failed can have left pins.
void VersionStore::begin(const StoreNumbers& numbers) {
  const std::lock_guard lock(mutex_);
  num_arrived_ = turn_ = 0;
  newest_              = 0;
  numbers_             = numbers;
  std::fill(pins_.begin(), pins_.end(), 0);
  std::fill(done_.begin(), done_.end(), 0);
}

void VersionStore::copy(const Context& context, int slot, std::span<std::byte* const> values) const {
  for (std::size_t i = 0; i < spec_.weights.size(); ++i) {
    copy_shared(context, values[i], places_[i].versions[static_cast<std::size_t>(slot)],
                spec_.weights[i].value_bytes());
  }
}

VersionStore::Taken VersionStore::take(const Context& context, int step, std::span<std::byte* const> values) {
  Taken taken;
  int slot = 0;
  {
    const std::lock_guard lock(mutex_);
    slot  = newest_;
    taken = {.version    = numbers_.num_updates,
             .staleness  = step - *std::min_element(done_.begin(), done_.end()),
             .loss_scale = numbers_.loss_scale};
    ++pins_[static_cast<std::size_t>(slot)];
  }
  const AtEnd unpin([&] {
    const std::lock_guard lock(mutex_);
    --pins_[static_cast<std::size_t>(slot)];
  });
  copy(context, slot, values);
  return taken;
}

// The thread that updates needs no other thread to go on, so waiting for it cannot last for ever.
bool VersionStore::wait_for_turn(const Context& context) {
  std::unique_lock lock(mutex_);
  const std::int64_t mine = num_arrived_++;
  if (turn_ != mine) context.waiting_for("the updates with gradients that arrived before");
  while (!turns_.wait_for(lock, std::chrono::milliseconds(50), [&] { return turn_ == mine; })) {
    if (context.stopping()) return false;
  }
  return true;
}

std::optional<std::int64_t> VersionStore::give(const Context& context, const Gift& gift) {
  if (!wait_for_turn(context)) return std::nullopt;
  const AtEnd next([&] {
    const std::lock_guard lock(mutex_);
    ++turn_;
    turns_.notify_all();
  });
  if (std::isnan(gift.factor)) {
    drop(gift);
    return std::nullopt;
  }
  int slot = 0;
  {
    const std::lock_guard lock(mutex_);
    while (slot == newest_ || pins_[static_cast<std::size_t>(slot)] > 0) {
      if (++slot == std::ssize(pins_)) throw Error(ErrorKind::graph, "asynchronous: no slot for a version is free");
    }
  }
  update(context, gift, slot);
  const std::lock_guard lock(mutex_);
  newest_ = slot;
  ++done_[static_cast<std::size_t>(gift.rank)];
  ++numbers_.num_updates;
  if (++numbers_.good_updates >= spec_.growth_steps * spec_.num_ranks && spec_.dynamic_scale) {
    numbers_.good_updates = 0;
    numbers_.loss_scale *= 2;
  }
  return numbers_.num_updates;
}

// Several gradients can overflow at one scale before the first of them arrives: the scale is halved once.
void VersionStore::drop(const Gift& gift) {
  const std::lock_guard lock(mutex_);
  ++done_[static_cast<std::size_t>(gift.rank)];
  if (!gift.overflows) return;  // it is of no target
  numbers_.good_updates = 0;
  if (spec_.dynamic_scale && gift.loss_scale == numbers_.loss_scale) numbers_.loss_scale /= 2;
}

void VersionStore::update(const Context& context, const Gift& gift, int slot) {
  const OptimizerPlan& plan = spec_.optimizer;
  for (std::size_t i = 0; i < spec_.weights.size(); ++i) {
    const SharedWeight& weight = spec_.weights[i];
    const Places& places       = places_[i];
    std::byte* const made      = places.versions[static_cast<std::size_t>(slot)];
    const std::byte* const old = places.versions[static_cast<std::size_t>(newest_)];
    for (const UpdateRange& range : weight.ranges) {
      const auto bytes = [&](DType type) {
        return static_cast<std::size_t>(range.begin) * static_cast<std::size_t>(size_bytes(type));
      };
      const std::size_t at = bytes(weight.wide);
      UpdateMemory memory{.count         = range.end - range.begin,
                          .type          = weight.wide,
                          .gradient_type = weight.gradient,
                          .before        = old + at,
                          .weight        = made + at,
                          .first         = places.first + at,
                          .second        = places.second == nullptr ? nullptr : places.second + at,
                          .gradient      = gift.grads[i] + bytes(weight.gradient)};
      if (weight.has_master()) {
        memory.rounded = weight.type;
        memory.before = memory.weight = places.master + at;
        memory.value                  = made + bytes(weight.type);
      }
      apply_update(context, memory,
                   {.adamw        = plan.kind == OptimizerKind::adamw,
                    .factor       = gift.factor,
                    .rate         = gift.rates[static_cast<std::size_t>(range.group)],
                    .beta1        = plan.beta1,
                    .beta2        = plan.beta2,
                    .eps          = plan.eps,
                    .momentum     = plan.momentum,
                    .weight_decay = range.decay,
                    .step         = numbers_.num_updates + 1});
    }
  }
}

void VersionStore::copy_newest(const Context& context, std::span<std::byte* const> values) const {
  copy(context, newest_, values);
}

}  // namespace stepgraph
