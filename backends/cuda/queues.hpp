#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/base/types.hpp"
#include "engine/run/device.hpp"

// The streams of a world's ranks, with the library handles for them. Internal to backends/cuda/.
namespace stepgraph::cuda {

// One lane of a rank. Communication and copies have priority over computation, because other nodes wait for them.
class Queue {
 public:
  Queue(int device, LaneKind kind, bool tf32);
  ~Queue();
  Queue(const Queue&)            = delete;
  Queue& operator=(const Queue&) = delete;

  [[nodiscard]] const DeviceQueue& handles() const noexcept { return handles_; }
  [[nodiscard]] cudaStream_t stream() const noexcept { return static_cast<cudaStream_t>(handles_.stream); }
  [[nodiscard]] int device() const noexcept { return device_; }
  // For a caller that enqueues work here and makes another stream wait for it at once. Nodes of one lane run in order,
  // so no other caller uses the event meanwhile.
  [[nodiscard]] cudaEvent_t reached() const noexcept { return reached_; }

 private:
  void make(LaneKind kind, bool tf32);
  void drop() noexcept;  // frees what has been created so far

  int device_;
  DeviceQueue handles_;
  cudaEvent_t reached_ = nullptr;
};

// Queues are created on first use.
class Queues {
 public:
  Queues(std::vector<int> devices, bool tf32) : devices_(std::move(devices)), tf32_(tf32) {}

  [[nodiscard]] Queue& of(Rank rank, LaneKind kind);
  [[nodiscard]] int device_of(Rank rank) const noexcept {
    return devices_[static_cast<std::size_t>(index(rank)) % devices_.size()];
  }
  [[nodiscard]] const std::vector<int>& devices() const noexcept { return devices_; }
  void synchronize() const;  // every device

  // A device has not finished a step and may never do so: no function may wait for it any more.
  void abandon() noexcept { abandoned_ = true; }
  [[nodiscard]] bool abandoned() const noexcept { return abandoned_; }
  void check_usable() const;  // throws Error(backend) after abandon()

 private:
  std::atomic<bool> abandoned_ = false;
  std::vector<int> devices_;
  bool tf32_;
  std::mutex mutex_;  // guards the map
  std::map<std::pair<int, LaneKind>, std::unique_ptr<Queue>> queues_;
};

// Device memory, not zeroed. Throws Error(backend) if there is too little; the message gives `what`, the bytes needed,
// the device's total and free bytes, and remedies.
[[nodiscard]] std::byte* allocate_on(int device, std::size_t size, const std::string& what);

// Makes a device current during its lifetime.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&)            = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

}  // namespace stepgraph::cuda
