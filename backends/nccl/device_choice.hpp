#pragma once
#include <span>

namespace stepgraph::nccl {

struct DeviceChoice {
  int device  = 0;
  bool shared = false;  // with other processes of this machine
};

// The GPU of a process: devices[local_rank]. An empty list: all `num_visible`. `may_share`: the user has told NCCL that
// processes are on different machines (NCCL_HOSTID), so they can share a GPU: a list that is too short begins again.
// Throws Error(config) if there is no GPU for the process, and Error(backend) if the machine does not have it.
[[nodiscard]] DeviceChoice choose_device(int local_rank, std::span<const int> devices, int num_visible, bool may_share);

}  // namespace stepgraph::nccl
