#pragma once
#include <cstdint>

#include "engine/base/error.hpp"
#include "engine/run/device.hpp"
#include "ops/cuda/common/workspace_bytes.hpp"

// Device memory for data between the kernels of one body. Internal to ops/cuda/.
namespace stepgraph::cuda {

class Workspace {
 public:
  Workspace(const DeviceQueue& queue, const char* op) : free_(queue.workspace), op_(op) {}

  [[nodiscard]] std::int64_t bytes_left() const { return static_cast<std::int64_t>(free_.size()); }

  // Memory for `count` elements. Throws Error(backend) if there is not enough left.
  template <class T>
  T* take(std::int64_t count) {
    const auto bytes = static_cast<std::size_t>(taken_bytes(count, sizeof(T)));
    if (bytes > free_.size()) {
      throw Error(ErrorKind::backend, str("cuda: ", op_, " needs ", bytes, " more bytes of workspace, but only ",
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
