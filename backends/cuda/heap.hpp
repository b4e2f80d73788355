#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace stepgraph::cuda {

// Makes a device current during its lifetime. A device that was current before, but has never been used, does not
// become current again: that would make a context on it, with its memory.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&)            = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int device_, before_ = 0;
};

// The memory of a world: on its devices, and pinned on the host. cudaFree and cudaFreeHost would wait for all work of a
// device, other worlds' too, and these may wait for a peer. So device memory is that of a pool, and is freed in the
// order of a stream of this object; pinned memory is used again, and freed with the world. All devices can use all of
// it. Thread-safe.
class Heap {
 public:
  explicit Heap(std::vector<int> devices) : devices_(std::move(devices)) {}
  ~Heap();
  Heap(const Heap&)            = delete;
  Heap& operator=(const Heap&) = delete;

  // Not zeroed. Throws Error(backend) if there is too little; the message gives `what`, the bytes needed, the device's
  // total and free bytes, and remedies.
  [[nodiscard]] std::byte* allocate(int device, std::size_t size, const std::string& what);
  void release(int device, std::byte* bytes) noexcept;  // no work uses it any more
  [[nodiscard]] std::byte* pin(std::size_t size, const std::string& what) { return take_pinned(size, what).bytes; }
  [[nodiscard]] std::byte* pin_zeroed(std::size_t size, const std::string& what);
  void unpin(std::byte* bytes) noexcept;
  // For copies and fills that the host waits for. No node uses it.
  [[nodiscard]] cudaStream_t copy_stream(int device);

  // A device that was given up may still use the memory: nothing is freed any more.
  void abandon() noexcept { abandoned_ = true; }
  [[nodiscard]] bool abandoned() const noexcept { return abandoned_; }

 private:
  struct Place {
    cudaStream_t stream = nullptr;
    cudaMemPool_t pool  = nullptr;  // null: the device has no pools
  };
  struct Pinned {
    std::size_t size = 0;
    bool mapped      = false;  // by map_pages
  };
  struct Taken {
    std::byte* bytes = nullptr;
    bool zeroed      = false;
  };
  [[nodiscard]] Taken take_pinned(std::size_t size, const std::string& what);
  [[nodiscard]] std::byte* pin_pages(std::size_t size);  // null: to be allocated otherwise
  [[nodiscard]] const Place& place_of(int device);
  void make_pool(int device, Place& place) const;

  std::vector<int> devices_;
  std::atomic<bool> abandoned_ = false;
  std::mutex mutex_;             // guards the rest
  std::map<int, Place> places_;  // by device
  std::map<std::byte*, Pinned> pinned_;
  std::multimap<std::size_t, std::byte*> unused_;  // pinned memory
};

}  // namespace stepgraph::cuda
