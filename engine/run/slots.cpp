#include "engine/run/slots.hpp"

namespace stepgraph {

Slots::Slots(int count) : count_(count), slots_(std::make_unique<Slot[]>(static_cast<std::size_t>(count))) {}

int Slots::try_acquire(int preferred) noexcept {
  for (int i = 0; i < count_; ++i) {
    const int slot           = (preferred + i) % count_;
    std::atomic<bool>& taken = slots_[static_cast<std::size_t>(slot)].taken;
    if (!taken.load() && !taken.exchange(true)) return slot;
  }
  return -1;
}

int Slots::acquire(int preferred) noexcept {
  if (const int slot = try_acquire(preferred); slot >= 0) return slot;
  waiters_.fetch_add(1);
  for (;;) {
    const std::uint32_t seen = releases_.load();
    // Looked at again after `waiters_` was raised: whoever releases from here on sees it and counts.
    if (const int slot = try_acquire(preferred); slot >= 0) {
      waiters_.fetch_sub(1);
      return slot;
    }
    releases_.wait(seen);
  }
}

void Slots::release(int slot) noexcept {
  slots_[static_cast<std::size_t>(slot)].taken.store(false);
  if (waiters_.load() > 0) {
    releases_.fetch_add(1);
    releases_.notify_all();
  }
}

bool Slots::some_free() const noexcept {
  for (int i = 0; i < count_; ++i) {
    if (!slots_[static_cast<std::size_t>(i)].taken.load()) return true;
  }
  return false;
}

bool Slots::contended() const noexcept { return waiters_.load(std::memory_order_relaxed) > 0; }

}  // namespace stepgraph
