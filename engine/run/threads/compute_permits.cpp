#include "engine/run/threads/compute_permits.hpp"

namespace stepgraph {

ComputePermits::ComputePermits(int count)
    : count_(count), permits_(std::make_unique<Permit[]>(static_cast<std::size_t>(count))) {}

int ComputePermits::try_acquire(int preferred) noexcept {
  for (int i = 0; i < count_; ++i) {
    const int permit         = (preferred + i) % count_;
    std::atomic<bool>& taken = permits_[static_cast<std::size_t>(permit)].taken;
    if (!taken.load() && !taken.exchange(true)) return permit;
  }
  return -1;
}

int ComputePermits::acquire(int preferred) noexcept {
  if (const int permit = try_acquire(preferred); permit >= 0) return permit;
  waiters_.fetch_add(1);
  for (;;) {
    const std::uint32_t seen = releases_.load();
    // Looked at again after `waiters_` was raised: a thread that releases a permit from here on sees it and counts.
    if (const int permit = try_acquire(preferred); permit >= 0) {
      waiters_.fetch_sub(1);
      return permit;
    }
    releases_.wait(seen);
  }
}

void ComputePermits::release(int permit) noexcept {
  permits_[static_cast<std::size_t>(permit)].taken.store(false);
  if (waiters_.load() > 0) {
    releases_.fetch_add(1);
    releases_.notify_all();
  }
}

bool ComputePermits::some_free() const noexcept {
  for (int i = 0; i < count_; ++i) {
    if (!permits_[static_cast<std::size_t>(i)].taken.load()) return true;
  }
  return false;
}

int ComputePermits::num_free() const noexcept {
  int sum = 0;
  for (int i = 0; i < count_; ++i) sum += !permits_[static_cast<std::size_t>(i)].taken.load();
  return sum;
}

bool ComputePermits::contended() const noexcept { return waiters_.load(std::memory_order_relaxed) > 0; }

}  // namespace stepgraph
