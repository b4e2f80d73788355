#pragma once
#include <memory>
#include <string>
#include <vector>

#include "backends/process/environment.hpp"
#include "backends/process/world.hpp"

namespace stepgraph {

// How the backend nccl uses GPUs.
struct NcclChoice {
  // Of the processes of this machine: that with LOCAL_RANK r has devices[r]. Empty: all that are visible. A number that
  // comes several times is a GPU that processes share; NCCL is then told that they are on different machines.
  std::vector<int> devices = {};
  bool exact               = false;     // reductions add in rank order
  bool pinned              = true;      // cuda::RanksOptions::pinned
  std::string algorithm    = "direct";  // NCCL's own choice; or ring, tree. Equal for all worlds of a process
};

// The world of this process on its GPU, over NCCL itself. Collective. Defined in builds with NCCL. Throws Error(config)
// for a choice that cannot work, and Error(backend) if there is no usable GPU.
[[nodiscard]] std::unique_ptr<ProcessWorld> make_nccl_world(const ProcessPlace& place,
                                                            const ProcessWorldOptions& options,
                                                            const NcclChoice& choice);

}  // namespace stepgraph
