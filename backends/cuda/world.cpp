#include "backends/cuda/world.hpp"

#include <algorithm>

#include "backends/cuda/operation.hpp"
#include "backends/cuda/ranks.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

std::shared_ptr<cuda::Ranks> make_ranks(int num_ranks, const CudaWorldOptions& options) {
  if (num_ranks < 1) throw Error(ErrorKind::config, str("cuda: ", num_ranks, " ranks (at least 1)"));
  std::vector<int> devices = options.devices;
  if (devices.empty()) {
    devices = cuda::all_devices();
    devices.resize(std::min(devices.size(), static_cast<std::size_t>(num_ranks)));
  }
  return cuda::Ranks::make(RankSet::all(num_ranks), {.devices     = std::move(devices),
                                                     .capture     = options.capture,
                                                     .tf32        = options.tf32,
                                                     .pinned      = options.pinned,
                                                     .check_nodes = options.check_nodes});
}

}  // namespace

CudaWorld::CudaWorld(int num_ranks, const CudaWorldOptions& options)
    : num_ranks_(num_ranks), ranks_(make_ranks(num_ranks, options)) {}
CudaWorld::~CudaWorld() = default;

Device* CudaWorld::device() const { return ranks_.get(); }
void CudaWorld::set_capture(bool capture) { ranks_->set_capture(capture); }
void CudaWorld::synchronize() { ranks_->synchronize(); }

void CudaWorld::communicate(const Context&, const Exchange& exchange) { cuda::communicate(exchange); }

}  // namespace stepgraph
