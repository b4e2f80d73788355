#include "backends/cuda/world.hpp"

#include "backends/cuda/arenas.hpp"
#include "backends/cuda/check.hpp"
#include "backends/cuda/devices.hpp"
#include "backends/cuda/operation.hpp"
#include "backends/cuda/queues.hpp"
#include "backends/cuda/streams.hpp"

namespace stepgraph {

struct CudaWorld::Impl final : Device, std::enable_shared_from_this<Impl> {
  Impl(int ranks, const CudaWorldOptions& options)
      : num_ranks(ranks),
        queues(options.devices, options.tf32),
        arenas(queues),
        shared{queues, options.capture, options.check_nodes} {
    shared.owner = [this] { return shared_from_this(); };
  }

  [[nodiscard]] DeviceMemory& memory() override { return arenas; }
  [[nodiscard]] std::unique_ptr<DeviceStreams> lower(const Graph& graph, StreamPlan plan) override {
    queues.check_usable();
    return std::make_unique<cuda::Streams>(shared, graph, std::move(plan));
  }

  int num_ranks;
  cuda::Queues queues;
  cuda::Arenas arenas;
  cuda::Shared shared;
};

CudaWorld::CudaWorld(int num_ranks, const CudaWorldOptions& options) {
  if (num_ranks < 1) throw Error(ErrorKind::config, str("cuda: ", num_ranks, " ranks (at least 1)"));
  if (options.devices.empty()) throw Error(ErrorKind::config, "cuda: no devices (at least one)");
  const auto here = cuda_devices();
  for (const int device : options.devices) {
    if (device >= 0 && device < static_cast<int>(here.size())) continue;
    throw Error(ErrorKind::backend,
                str("cuda: no device ", device, " (this machine has ", here.size(), "; or use backend loopback)"));
  }
  impl_ = std::make_shared<Impl>(num_ranks, options);
}
CudaWorld::~CudaWorld() = default;

int CudaWorld::num_ranks() const { return impl_->num_ranks; }
Device* CudaWorld::device() const { return impl_.get(); }
void CudaWorld::set_capture(bool capture) { impl_->shared.capture = capture; }
void CudaWorld::synchronize() { impl_->queues.synchronize(); }

void CudaWorld::communicate(const Context&, const Exchange& exchange) { cuda::communicate(exchange); }

}  // namespace stepgraph
