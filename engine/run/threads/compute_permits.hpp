#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "engine/run/threads/numa_places.hpp"

namespace stepgraph {

// A permit to compute for each thread of `places`: so many threads compute at one moment, and on each NUMA node so many
// as it has. The thread that runs a body takes one, and waits until one is free. Holders compute, and wait at most for
// threads that compute, so a permit always comes back. A helper of a parallel kernel takes a permit only if one is free
// at once.
// Each permit has a cache line of its own, and each worker a preferred permit, so that workers seldom share a line. It
// is a number among the permits that are asked for.
class ComputePermits {
 public:
  explicit ComputePermits(const NumaPlaces& places);

  [[nodiscard]] int acquire(int preferred, const NumaRange& among) noexcept;
  [[nodiscard]] int try_acquire(int preferred, const NumaRange& among) noexcept;  // -1: none free
  void release(int permit) noexcept;
  [[nodiscard]] int node(int permit) const noexcept { return permits_[static_cast<std::size_t>(permit)].node; }
  [[nodiscard]] bool contended(int node) const noexcept;  // a thread waits for one of this node
  [[nodiscard]] bool some_free(const NumaRange& among) const noexcept;
  [[nodiscard]] int num_free(const NumaRange& among) const noexcept;

 private:
  struct alignas(64) Permit {
    std::atomic<bool> taken{false};
    int node = 0;
  };
  struct alignas(64) Waiters {
    std::atomic<int> count{0};
  };
  void add_waiter(NodeRange nodes, int change) noexcept;

  std::unique_ptr<Permit[]> permits_;
  std::unique_ptr<Waiters[]> waiters_;                  // by node
  alignas(64) std::atomic<std::uint32_t> releases_{0};  // counts releases seen by waiters; what they sleep on
};

}  // namespace stepgraph
