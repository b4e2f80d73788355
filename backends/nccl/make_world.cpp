#include "backends/nccl/make_world.hpp"

#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <string>
#include <utility>

#include "backends/cuda/devices.hpp"
#include "backends/cuda/ranks.hpp"
#include "backends/nccl/device_choice.hpp"
#include "backends/nccl/nccl_library.hpp"
#include "backends/nccl/world.hpp"
#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

// What this process has told NCCL, and not its user: NCCL_HOSTID.
std::string own_host_id;

bool user_lets_share() {
  const char* const id = std::getenv("NCCL_HOSTID");
  return id != nullptr && id != own_host_id;
}

nccl::DeviceChoice choose(const ProcessPlace& place, const NcclChoice& choice) {
  if (!place.local_is_known)
    throw Error(
        ErrorKind::config,
        "LOCAL_RANK: is not set, so the GPU of this process is not known (set it, or use a launcher that does)");
  return nccl::choose_device(place.local_rank, choice.devices, static_cast<int>(cuda_devices().size()),
                             user_lets_share());
}

// NCCL refuses two processes on one GPU, unless it takes them for different machines. They then use sockets.
void share_gpu(const ProcessPlace& place) {
  if (user_lets_share()) return;
  own_host_id = str("stepgraph-", ::gethostid(), "-", place.rank);
  static_cast<void>(::setenv("NCCL_HOSTID", own_host_id.c_str(), 1));
  if (is_loopback_name(place.address)) static_cast<void>(::setenv("NCCL_SOCKET_IFNAME", "lo", 0));
}

}  // namespace

std::unique_ptr<ProcessWorld> make_nccl_world(const ProcessPlace& place, const ProcessWorldOptions& options,
                                              const NcclChoice& choice) {
  const auto algorithm = nccl::algorithm_of(choice.algorithm);
  if (!algorithm)
    throw Error(ErrorKind::config, str("nccl: algorithm '", choice.algorithm,
                                       "' is not one that NCCL can be told (direct, ring or tree)"));
  // Variables are set before the world has threads. What is wrong with this process alone is told to all of them.
  nccl::DeviceChoice device;
  std::exception_ptr flaw;
  try {
    device = choose(place, choice);
    if (device.shared) share_gpu(place);
    nccl::set_variables(*algorithm);
  } catch (const Error&) {
    flaw = std::current_exception();
  }
  const NcclWorldOptions nccl{.calls = {.exact = choice.exact}, .capture = choice.pinned};
  return std::make_unique<NcclWorld>(place, options, nccl, [&](std::function<bool(bool)> may_capture) {
    if (flaw) std::rethrow_exception(flaw);
    const auto ranks = cuda::Ranks::make(
        RankSet(Rank{place.rank}),
        {.devices = {device.device}, .pinned = choice.pinned, .may_capture = std::move(may_capture), .markers = true});
    return NcclWorld::Parts{
        .device      = ranks,
        .library     = nccl::make_nccl_library(device.device),
        .set_capture = [ranks](bool capture) { ranks->set_capture(capture); },
    };
  });
}

}  // namespace stepgraph
