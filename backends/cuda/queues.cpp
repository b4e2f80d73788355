#include "backends/cuda/queues.hpp"

#include <cublasLt.h>
#include <cudnn.h>

#include "backends/cuda/check.hpp"

namespace stepgraph::cuda {
namespace {

constexpr std::size_t workspace_bytes = std::size_t{1} << 30, num_counters = 4096;

void check_blas(cublasStatus_t status, std::string_view doing) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(ErrorKind::backend, str("cuda: ", doing, ": ", cublasLtGetStatusString(status)));
}
void check_dnn(cudnnStatus_t status, std::string_view doing) {
  if (status != CUDNN_STATUS_SUCCESS)
    throw Error(ErrorKind::backend, str("cuda: ", doing, ": ", cudnnGetErrorString(status)));
}

}  // namespace

OnDevice::OnDevice(int device) {
  check(cudaGetDevice(&before_), "asking for the current device");
  if (device != before_) check(cudaSetDevice(device), [&] { return str("using device ", device); });
}
OnDevice::~OnDevice() { static_cast<void>(cudaSetDevice(before_)); }

std::byte* allocate_on(int device, std::size_t size, const std::string& what) {
  const OnDevice here(device);
  void* bytes              = nullptr;
  const cudaError_t status = cudaMalloc(&bytes, size);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "asking for free memory");
    throw Error(ErrorKind::backend,
                str("cuda: ", what, " needs ", size, " bytes on device ", device, "; of its ", total, " bytes, ", free,
                    " are free (fewer ranks on it, or recompute, shard or a smaller batch.micro)"));
  }
  check(status, [&] { return str("allocating ", size, " bytes for ", what); });
  return static_cast<std::byte*>(bytes);
}

Queue::Queue(int device, LaneKind kind, bool tf32) : device_(device) {
  try {
    make(kind, tf32);
  } catch (...) {
    drop();
    throw;
  }
}

void Queue::make(LaneKind kind, bool tf32) {
  const OnDevice here(device_);
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for stream priorities");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, kind == LaneKind::compute ? least : greatest),
        [&] { return str("making the stream of ", to_string(kind)); });
  handles_.owner  = this;
  handles_.stream = stream;
  handles_.tf32   = tf32;
  check(cudaEventCreateWithFlags(&reached_, cudaEventDisableTiming), "making an event");
  if (kind != LaneKind::compute) return;
  cublasLtHandle_t blas = nullptr;
  check_blas(cublasLtCreate(&blas), "starting cuBLASLt");
  handles_.blas     = blas;
  cudnnHandle_t dnn = nullptr;
  check_dnn(cudnnCreate(&dnn), "starting cuDNN");
  handles_.dnn = dnn;
  check_dnn(cudnnSetStream(dnn, stream), "giving cuDNN its stream");
  handles_.workspace = {
      allocate_on(device_, workspace_bytes, "the workspace of a compute stream (in addition to the arenas)"),
      workspace_bytes};
  constexpr std::size_t counter_bytes = num_counters * sizeof(unsigned);
  std::byte* const counters           = allocate_on(device_, counter_bytes, "the counters of a compute stream");
  handles_.counters                   = {reinterpret_cast<unsigned*>(counters), num_counters};
  check(cudaMemsetAsync(counters, 0, counter_bytes, stream), "clearing counters");
  check(cudaStreamSynchronize(stream), "clearing counters");  // a graph that runs on another stream may use them
}

Queue::~Queue() { drop(); }

void Queue::drop() noexcept {
  int before = 0;
  static_cast<void>(cudaGetDevice(&before));
  static_cast<void>(cudaSetDevice(device_));
  if (handles_.stream != nullptr) static_cast<void>(cudaStreamSynchronize(stream()));
  if (handles_.dnn != nullptr) static_cast<void>(cudnnDestroy(static_cast<cudnnHandle_t>(handles_.dnn)));
  if (handles_.blas != nullptr) static_cast<void>(cublasLtDestroy(static_cast<cublasLtHandle_t>(handles_.blas)));
  if (!handles_.workspace.empty()) static_cast<void>(cudaFree(handles_.workspace.data()));
  if (!handles_.counters.empty()) static_cast<void>(cudaFree(handles_.counters.data()));
  if (reached_ != nullptr) static_cast<void>(cudaEventDestroy(reached_));
  if (handles_.stream != nullptr) static_cast<void>(cudaStreamDestroy(stream()));
  static_cast<void>(cudaSetDevice(before));
}

Queue& Queues::of(Rank rank, LaneKind kind) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Queue>& queue = queues_[{index(rank), kind}];
  if (!queue) queue = std::make_unique<Queue>(device_of(rank), kind, tf32_);
  return *queue;
}

void Queues::check_usable() const {
  if (abandoned_)
    throw Error(ErrorKind::backend,
                "cuda: a step has not finished in time, and the devices may still work on it (start a new process)");
}

void Queues::synchronize() const {
  check_usable();
  for (const int device : devices_) {
    const OnDevice here(device);
    check(cudaDeviceSynchronize(), [&] { return str("waiting for device ", device); });
  }
}

}  // namespace stepgraph::cuda
