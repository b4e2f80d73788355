#include "backends/cuda/ranks.hpp"

#include <algorithm>

#include "backends/cuda/arenas.hpp"
#include "backends/cuda/check.hpp"
#include "backends/cuda/devices.hpp"
#include "backends/cuda/queues.hpp"
#include "backends/cuda/streams.hpp"

namespace stepgraph::cuda {
namespace {

void check_devices(const RankSet& ranks, const std::vector<int>& devices) {
  if (devices.empty()) throw Error(ErrorKind::config, "cuda: no devices (at least one)");
  if (devices.size() > ranks.size()) {
    throw Error(ErrorKind::config,
                str("cuda: ", devices.size(), " devices for ", ranks.size(), ranks.size() == 1 ? " rank" : " ranks",
                    ", so that some would have none (at most ", ranks.size(), ")"));
  }
  const auto count = static_cast<int>(cuda_devices().size());
  for (const int device : devices) {
    if (device >= 0 && device < count) continue;
    throw Error(ErrorKind::backend, str("cuda: no device ", device, " (this machine has ", count,
                                        count == 1 ? ": 0" : str(": 0 to ", count - 1), "; or use backend loopback)"));
  }
}

// The devices of a world read and write each other's memory.
void enable_peers(const std::vector<int>& devices) {
  for (const int from : devices) {
    for (const int to : devices) {
      if (from == to) continue;
      int can = 0;
      check(cudaDeviceCanAccessPeer(&can, from, to), [&] { return str("asking device ", from, " for its peers"); });
      if (can == 0) {
        throw Error(ErrorKind::backend,
                    str("cuda: device ", from, " cannot use the memory of device ", to,
                        " (devices with peer access, as nvidia-smi topo -p2p r shows; or one of the two for all ranks: "
                        "devices [",
                        from, "])"));
      }
      const OnDevice here(from);
      const cudaError_t status = cudaDeviceEnablePeerAccess(to, 0);
      if (status == cudaErrorPeerAccessAlreadyEnabled) {
        static_cast<void>(cudaGetLastError());
      } else {
        check(status, [&] { return str("giving device ", from, " access to device ", to); });
      }
    }
  }
}

}  // namespace

std::vector<int> all_devices() {
  std::vector<int> numbers(cuda_devices().size());
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int>(i);
  return numbers;
}

struct Ranks::Impl {
  Impl(const RankSet& ranks, RanksOptions&& options)
      : queues(ranks, std::move(options.devices), options.tf32),
        arenas(queues, options.pinned),
        shared(queues, options.capture && options.pinned, options.check_nodes, options.markers),
        may_capture(std::move(options.may_capture)) {}

  Queues queues;
  Arenas arenas;
  Shared shared;
  std::function<bool(bool)> may_capture;
};

Ranks::Ranks(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Ranks::~Ranks() = default;

std::shared_ptr<Ranks> Ranks::make(const RankSet& ranks, RanksOptions options) {
  check_devices(ranks, options.devices);
  enable_peers(options.devices);
  std::shared_ptr<Ranks> made(new Ranks(std::make_unique<Impl>(ranks, std::move(options))));
  made->impl_->shared.owner = [self = made.get()] { return self->shared_from_this(); };
  return made;
}

const RankSet& Ranks::ranks() const noexcept { return impl_->queues.ranks(); }
int Ranks::device_of(Rank rank) const { return impl_->queues.device_of(rank); }
DeviceMemory& Ranks::memory() { return impl_->arenas; }
void Ranks::set_capture(bool capture) { impl_->shared.capture = capture; }
void Ranks::synchronize() { impl_->queues.synchronize(); }

// Processes agree before anything that can fail in one of them.
std::unique_ptr<DeviceStreams> Ranks::lower(const Graph& graph, StreamPlan plan) {
  impl_->queues.check_usable();
  bool captures = std::ranges::find(plan.stream, StreamPlan::none) == plan.stream.end();  // no host nodes
  if (impl_->may_capture) captures = impl_->may_capture(captures && impl_->shared.capture) && captures;
  return std::make_unique<Streams>(impl_->shared, graph, std::move(plan), captures);
}

std::optional<DeviceProgress> Ranks::progress() {
  const std::lock_guard guard(impl_->shared.last_mutex);
  return impl_->shared.last == nullptr ? std::nullopt : impl_->shared.last->progress();
}

// Programs of other processes may have counted a stopped run as good: all begin again alike.
void Ranks::drop_captures() {
  const std::lock_guard lock(impl_->shared.mutex);
  if (impl_->queues.abandoned()) return;
  impl_->queues.synchronize();
  const std::lock_guard guard(impl_->shared.last_mutex);
  for (Streams* const program : impl_->shared.programs) program->drop_capture();
  impl_->shared.last = nullptr;
}

}  // namespace stepgraph::cuda
