#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace stepgraph {

// `count` licences to compute. A node's body takes one and waits if it must: licences are held by bodies that compute
// and never wait, so one comes back. A helper of a parallel kernel takes one only if it is free at once.
// Each licence has a cache line of its own and each worker a preferred one, so that workers seldom meet.
class Slots {
 public:
  explicit Slots(int count);

  [[nodiscard]] int acquire(int preferred) noexcept;
  [[nodiscard]] int try_acquire(int preferred) noexcept;  // -1: none free
  void release(int slot) noexcept;
  [[nodiscard]] bool contended() const noexcept;  // somebody waits
  [[nodiscard]] bool some_free() const noexcept;

 private:
  struct alignas(64) Slot {
    std::atomic<bool> taken{false};
  };
  int count_;
  std::unique_ptr<Slot[]> slots_;
  alignas(64) std::atomic<int> waiters_{0};
  std::atomic<std::uint32_t> releases_{0};  // counts releases seen by waiters; what they sleep on
};

}  // namespace stepgraph
