#pragma once
#include <cstddef>
#include <span>

namespace stepgraph {

// Where a body that runs on a device puts its work: what is enqueued there runs in this order, after the body has
// returned. Handles are the vendor's, as opaque pointers; only ops/cuda/ and backends/ know what is behind them.
struct DeviceQueue {
  void* stream                   = nullptr;  // cudaStream_t
  void* blas                     = nullptr;  // cublasLtHandle_t
  void* dnn                      = nullptr;  // cudnnHandle_t, which works on the stream
  std::span<std::byte> workspace = {};       // device memory of this stream alone; none on lanes that do not compute
};

}  // namespace stepgraph
