#include "backends/cuda/queues.hpp"

#include <cublasLt.h>
#include <cudnn.h>

#include <algorithm>

#include "backends/cuda/check.hpp"

namespace stepgraph::cuda {
namespace {

constexpr std::size_t num_counters = 4096;

void check_blas(cublasStatus_t status, std::string_view doing) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(ErrorKind::backend, str("cuda: ", doing, ": ", cublasLtGetStatusString(status)));
}
void check_dnn(cudnnStatus_t status, std::string_view doing) {
  if (status != CUDNN_STATUS_SUCCESS)
    throw Error(ErrorKind::backend, str("cuda: ", doing, ": ", cudnnGetErrorString(status)));
}

}  // namespace

Queue::Queue(Heap& heap, int device, int logical, LaneKind kind, bool tf32)
    : heap_(heap), device_(device), logical_(logical) {
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
  constexpr std::size_t counter_bytes = num_counters * sizeof(unsigned);
  std::byte* const counters           = heap_.allocate(device_, counter_bytes, "the counters of a compute stream");
  handles_.counters                   = {reinterpret_cast<unsigned*>(counters), num_counters};
  check(cudaMemsetAsync(counters, 0, counter_bytes, stream), "clearing counters");
  check(cudaStreamSynchronize(stream), "clearing counters");  // a graph that runs on another stream may use them
}

Queue::~Queue() { drop(); }

void Queue::drop() noexcept {
  try {
    const OnDevice here(device_);
    if (handles_.stream != nullptr) static_cast<void>(cudaStreamSynchronize(stream()));
    if (handles_.dnn != nullptr) static_cast<void>(cudnnDestroy(static_cast<cudnnHandle_t>(handles_.dnn)));
    if (handles_.blas != nullptr) static_cast<void>(cublasLtDestroy(static_cast<cublasLtHandle_t>(handles_.blas)));
    if (!handles_.counters.empty()) heap_.release(device_, reinterpret_cast<std::byte*>(handles_.counters.data()));
    if (reached_ != nullptr) static_cast<void>(cudaEventDestroy(reached_));
    if (handles_.stream != nullptr) static_cast<void>(cudaStreamDestroy(stream()));
  } catch (const Error&) {  // the device has failed
  }
}

void Queue::refuse_device(cudaError_t status) const {
  check(status, str("using device ", device_));
  throw Error(ErrorKind::backend, str("cuda: using device ", device_));
}

void Queue::refuse_logical() const {
  throw Error(ErrorKind::backend, str("cuda: work for logical device ", logical_, " while logical device ",
                                      current_logical, " is current"));
}

std::shared_ptr<const Workspace> Queue::workspace(std::size_t size, const std::string& what) {
  if (auto largest = largest_.lock(); largest && largest->bytes().size() >= size) return largest;
  auto larger = std::make_shared<const Workspace>(heap_, device_, size, what);
  largest_    = larger;
  return larger;
}

Queues::Queues(RankSet ranks, std::vector<int> devices, bool tf32)
    : ranks_(std::move(ranks)),
      devices_(std::move(devices)),
      one_device_(std::ranges::all_of(devices_, [&](int device) { return device == devices_.front(); })),
      tf32_(tf32),
      heap_(devices_) {}

std::size_t Queues::logical_of(Rank rank) const {
  const auto place = ranks_.place(rank);
  if (!place)
    throw Error(ErrorKind::backend, str("cuda: rank ", rank, " is not in this process (", to_string(ranks_), ")"));
  return *place % devices_.size();
}

Queue& Queues::of(Rank rank, LaneKind kind) {
  const std::size_t logical = logical_of(rank);
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Queue>& queue = queues_[{index(rank), kind}];
  if (!queue) queue = std::make_unique<Queue>(heap_, devices_[logical], static_cast<int>(logical), kind, tf32_);
  return *queue;
}

int Queues::device_with(const void* memory) const {
  if (one_device_) return devices_.front();
  cudaPointerAttributes found{};
  check(cudaPointerGetAttributes(&found, memory), "asking for the device of an address");
  return found.type == cudaMemoryTypeDevice ? found.device : devices_.front();
}

void Queues::copy(void* to, const void* from, std::size_t size, const char* doing) {
  const auto message = [&] { return str(doing, " ", size, " bytes"); };
  synchronize();
  // One of the two is in a device's memory, the other one in the host's.
  const int of_from = device_with(from);
  const int device  = of_from != devices_.front() ? of_from : device_with(to);
  const OnDevice here(device);
  const cudaStream_t stream = heap_.copy_stream(device);
  check(cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream), message);
  check(cudaStreamSynchronize(stream), message);
}

void Queues::clear(int device, std::byte* bytes, std::size_t size) {
  const OnDevice here(device);
  const cudaStream_t stream = heap_.copy_stream(device);
  check(cudaMemsetAsync(bytes, 0, size, stream), "clearing an arena");
  check(cudaStreamSynchronize(stream), "clearing an arena");
}

void Queues::check_usable() const {
  if (abandoned())
    throw Error(ErrorKind::backend,
                "cuda: a step has not finished in time, and the devices may still work on it (start a new process)");
}

// A run that begins meanwhile counts again, also when all of it is enqueued.
void Queues::synchronize() {
  check_usable();
  if (enqueued_ == waited_) return;
  const std::lock_guard no_capture(capture_mutex_);
  const OnDevice here(devices_.front());
  const std::uint64_t enqueued = enqueued_;
  const std::lock_guard lock(mutex_);
  for (const auto& [key, queue] : queues_)
    check(cudaStreamSynchronize(queue->stream()), [&] { return str("waiting for rank ", key.first, " ", key.second); });
  waited_ = enqueued;
}

}  // namespace stepgraph::cuda
