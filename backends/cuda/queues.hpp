#pragma once
#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/base/types.hpp"
#include "engine/run/device.hpp"

// The streams of a world's ranks, and what libraries need to work on them: internal to backends/cuda/.
namespace stepgraph::cuda {

// One lane of a rank. Communication and copies have priority over computation: they are what others wait for.
class Queue {
 public:
  Queue(int device, LaneKind kind, bool tf32);
  ~Queue();
  Queue(const Queue&)            = delete;
  Queue& operator=(const Queue&) = delete;

  [[nodiscard]] const DeviceQueue& handles() const noexcept { return handles_; }
  [[nodiscard]] cudaStream_t stream() const noexcept { return static_cast<cudaStream_t>(handles_.stream); }
  [[nodiscard]] int device() const noexcept { return device_; }
  // For whoever has just enqueued something here and lets another stream wait for it at once: the lane's chain of
  // nodes keeps others from it meanwhile.
  [[nodiscard]] cudaEvent_t reached() const noexcept { return reached_; }

 private:
  void make(LaneKind kind, bool tf32);
  void drop() noexcept;  // what there is of it

  int device_;
  DeviceQueue handles_;
  cudaEvent_t reached_ = nullptr;
};

// Made when they are first asked for.
class Queues {
 public:
  Queues(std::vector<int> devices, bool tf32) : devices_(std::move(devices)), tf32_(tf32) {}

  [[nodiscard]] Queue& of(Rank rank, LaneKind kind);
  [[nodiscard]] int device_of(Rank rank) const noexcept {
    return devices_[static_cast<std::size_t>(index(rank)) % devices_.size()];
  }
  [[nodiscard]] const std::vector<int>& devices() const noexcept { return devices_; }
  void synchronize() const;  // every device

 private:
  std::vector<int> devices_;
  bool tf32_;
  std::mutex mutex_;  // guards the map
  std::map<std::pair<int, LaneKind>, std::unique_ptr<Queue>> queues_;
};

// Device memory, not zeroed. Throws Error(backend) where there is too little: `what` needs so many bytes, how many the
// device has and how many are free, and what would help.
[[nodiscard]] std::byte* allocate_on(int device, std::size_t size, const std::string& what);

// Makes a device current while it lives.
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
