#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace stepgraph {

// `count` permits to compute: the number of threads that compute at one moment. The thread of a node's body takes one,
// and waits until one is free. Holders compute, and wait at most for threads that compute, so a permit
// always comes back. A helper of a parallel
// kernel takes a permit only if one is free at once.
// Each permit has a cache line of its own, and each worker a preferred permit, so that workers seldom share a line.
class ComputePermits {
 public:
  explicit ComputePermits(int count);

  [[nodiscard]] int acquire(int preferred) noexcept;
  [[nodiscard]] int try_acquire(int preferred) noexcept;  // -1: none free
  void release(int permit) noexcept;
  [[nodiscard]] bool contended() const noexcept;  // a thread waits for one
  [[nodiscard]] bool some_free() const noexcept;
  [[nodiscard]] int num_free() const noexcept;

 private:
  struct alignas(64) Permit {
    std::atomic<bool> taken{false};
  };
  int count_;
  std::unique_ptr<Permit[]> permits_;
  alignas(64) std::atomic<int> waiters_{0};
  std::atomic<std::uint32_t> releases_{0};  // counts releases seen by waiters; what they sleep on
};

}  // namespace stepgraph
