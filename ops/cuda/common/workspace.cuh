#pragma once
#include <cstdint>

#include "engine/base/error.hpp"
#include "engine/run/device.hpp"

// Device memory for what is between two kernels of one body: internal to ops/cuda/.
namespace stepgraph::cuda {

class Workspace {
 public:
  Workspace(const DeviceQueue& queue, const char* op) : free_(queue.workspace), op_(op) {}

  [[nodiscard]] std::int64_t bytes_left() const { return static_cast<std::int64_t>(free_.size()); }

  // Room for `count` elements. Throws Error(backend) where there is none.
  template <class T>
  T* take(std::int64_t count) {
    constexpr std::size_t alignment = 256;
    const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(T) + alignment - 1) / alignment * alignment;
    if (bytes > free_.size()) {
      throw Error(ErrorKind::backend, str("cuda: ", op_, " needs ", bytes, " more bytes of workspace, and ",
                                          free_.size(), " are left (a larger workspace, or smaller tensors)"));
    }
    T* const taken = reinterpret_cast<T*>(free_.data());
    free_          = free_.subspan(bytes);
    return taken;
  }

 private:
  std::span<std::byte> free_;
  const char* op_;
};

}  // namespace stepgraph::cuda
