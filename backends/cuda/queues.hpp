#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "backends/cuda/heap.hpp"
#include "engine/base/types.hpp"
#include "engine/graph/rank_set.hpp"
#include "engine/run/device.hpp"

// The streams of a world's ranks, with the library handles for them. Internal to backends/.
namespace stepgraph::cuda {

// The workspace of a stream. Programs share it; it is freed with the last of them.
class Workspace {
 public:
  Workspace(Heap& heap, int device, std::size_t size, const std::string& what)
      : heap_(heap), device_(device), bytes_(heap.allocate(device, size, what), size) {}
  ~Workspace() { heap_.release(device_, bytes_.data()); }
  Workspace(const Workspace&)            = delete;
  Workspace& operator=(const Workspace&) = delete;
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  Heap& heap_;
  int device_;
  std::span<std::byte> bytes_;
};

// One lane of a rank. Communication and copies have priority over computation, because other nodes wait for them.
class Queue {
 public:
  // `logical`: the place of its device in the list of devices, which can have a number several times.
  Queue(Heap& heap, int device, int logical, LaneKind kind, bool tf32);
  ~Queue();
  Queue(const Queue&)            = delete;
  Queue& operator=(const Queue&) = delete;

  // Without workspace, which each program has of its own.
  [[nodiscard]] const DeviceQueue& handles() const noexcept { return handles_; }
  [[nodiscard]] cudaStream_t stream() const noexcept { return static_cast<cudaStream_t>(handles_.stream); }
  [[nodiscard]] int device() const noexcept { return device_; }
  // For work that is enqueued here: its device is the current one of this thread. Which one is also noted by logical
  // number, so that tests on one GPU find work that is enqueued while another logical device is current.
  void make_current() const {
    if (const cudaError_t status = cudaSetDevice(device_); status != cudaSuccess) refuse_device(status);
    current_logical = logical_;
  }
  void check_current() const {
    if (current_logical != logical_) refuse_logical();
  }
  // For a caller that enqueues work here and makes another stream wait for it at once. Nodes of one lane run in order,
  // so no other caller uses the event meanwhile.
  [[nodiscard]] cudaEvent_t reached() const noexcept { return reached_; }

  // At least `size` bytes. Programs of a world never run at the same time, so they share one if it is large enough. A
  // larger one does not replace it for programs that have it: captured steps contain its address.
  [[nodiscard]] std::shared_ptr<const Workspace> workspace(std::size_t size, const std::string& what);

 private:
  void make(LaneKind kind, bool tf32);
  void drop() noexcept;  // frees what has been created so far
  [[noreturn]] void refuse_device(cudaError_t status) const;
  [[noreturn]] void refuse_logical() const;
  inline static thread_local int current_logical = -1;

  Heap& heap_;
  int device_, logical_;
  DeviceQueue handles_;
  cudaEvent_t reached_ = nullptr;
  std::weak_ptr<const Workspace> largest_;
};

// Queues are created on first use. The k-th rank of the set is on devices[k % size].
class Queues {
 public:
  Queues(RankSet ranks, std::vector<int> devices, bool tf32);
  Queues(const Queues&)            = delete;
  Queues& operator=(const Queues&) = delete;

  [[nodiscard]] Queue& of(Rank rank, LaneKind kind);
  [[nodiscard]] const RankSet& ranks() const noexcept { return ranks_; }
  [[nodiscard]] int device_of(Rank rank) const { return devices_[logical_of(rank)]; }
  [[nodiscard]] Heap& heap() noexcept { return heap_; }

  // Copies between the host and device memory, in order. Both wait for the streams of these queues, and nothing else.
  void copy(void* to, const void* from, std::size_t size, const char* doing);
  void clear(int device, std::byte* bytes, std::size_t size);

  // Waits for all work that was enqueued on these queues. Work of other worlds on the same devices does not matter.
  void synchronize();
  void set_busy() noexcept { ++enqueued_; }  // work was enqueued
  // While a step is captured, its streams cannot be waited for: the capture would fail. The thread that captures holds
  // this, and synchronize() waits for it.
  [[nodiscard]] std::recursive_mutex& capture_mutex() noexcept { return capture_mutex_; }

  // A device has not finished a step and may never do so: no function may wait for it any more.
  void abandon() noexcept { heap_.abandon(); }
  [[nodiscard]] bool abandoned() const noexcept { return heap_.abandoned(); }
  void check_usable() const;  // throws Error(backend) after abandon()

 private:
  [[nodiscard]] std::size_t logical_of(Rank rank) const;
  [[nodiscard]] int device_with(const void* memory) const;

  std::atomic<std::uint64_t> enqueued_ = 0;  // calls of set_busy() ...
  std::atomic<std::uint64_t> waited_   = 0;  // ... and how many of them synchronize() has waited for
  RankSet ranks_;
  std::vector<int> devices_;
  bool one_device_;  // all numbers are equal
  bool tf32_;
  Heap heap_;
  std::recursive_mutex capture_mutex_;
  std::mutex mutex_;  // guards the map
  std::map<std::pair<int, LaneKind>, std::unique_ptr<Queue>> queues_;
};

}  // namespace stepgraph::cuda
