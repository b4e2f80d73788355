#include "engine/run/threads/compute_permits.hpp"

namespace stepgraph {

ComputePermits::ComputePermits(const NumaPlaces& places)
    : permits_(std::make_unique<Permit[]>(static_cast<std::size_t>(places.num_threads()))),
      waiters_(std::make_unique<Waiters[]>(static_cast<std::size_t>(places.num_nodes()))) {
  for (int i = 0; i < places.num_threads(); ++i) permits_[static_cast<std::size_t>(i)].node = places.node_of_thread(i);
}

int ComputePermits::try_acquire(int preferred, const NumaRange& among) noexcept {
  for (int i = 0; i < among.num_threads; ++i) {
    const int permit         = among.first_thread + (preferred + i) % among.num_threads;
    std::atomic<bool>& taken = permits_[static_cast<std::size_t>(permit)].taken;
    if (!taken.load() && !taken.exchange(true)) return permit;
  }
  return -1;
}

int ComputePermits::acquire(int preferred, const NumaRange& among) noexcept {
  if (const int permit = try_acquire(preferred, among); permit >= 0) return permit;
  add_waiter(among.nodes, 1);
  for (;;) {
    const std::uint32_t seen = releases_.load();
    // Looked at again after the waiters were counted: a thread that releases a permit from here on sees it and counts.
    if (const int permit = try_acquire(preferred, among); permit >= 0) {
      add_waiter(among.nodes, -1);
      return permit;
    }
    releases_.wait(seen);
  }
}

void ComputePermits::add_waiter(NodeRange nodes, int change) noexcept {
  for (int node = nodes.first; node < nodes.end(); ++node)
    waiters_[static_cast<std::size_t>(node)].count.fetch_add(change);
}

void ComputePermits::release(int permit) noexcept {
  const int of_node = node(permit);
  permits_[static_cast<std::size_t>(permit)].taken.store(false);
  if (waiters_[static_cast<std::size_t>(of_node)].count.load() > 0) {
    releases_.fetch_add(1);
    releases_.notify_all();
  }
}

bool ComputePermits::some_free(const NumaRange& among) const noexcept {
  for (int i = 0; i < among.num_threads; ++i) {
    if (!permits_[static_cast<std::size_t>(among.first_thread + i)].taken.load()) return true;
  }
  return false;
}

int ComputePermits::num_free(const NumaRange& among) const noexcept {
  int sum = 0;
  for (int i = 0; i < among.num_threads; ++i)
    sum += !permits_[static_cast<std::size_t>(among.first_thread + i)].taken.load();
  return sum;
}

bool ComputePermits::contended(int node) const noexcept {
  return waiters_[static_cast<std::size_t>(node)].count.load(std::memory_order_relaxed) > 0;
}

}  // namespace stepgraph
