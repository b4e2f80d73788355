#include "backends/nccl/device_choice.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "engine/base/error.hpp"

namespace stepgraph::nccl {

DeviceChoice choose_device(int local_rank, std::span<const int> devices, int num_visible, bool may_share) {
  std::vector<int> list(devices.begin(), devices.end());
  if (list.empty()) {
    list.resize(static_cast<std::size_t>(num_visible));
    std::iota(list.begin(), list.end(), 0);
  }
  const auto place = static_cast<std::size_t>(local_rank);
  if (list.empty() || (place >= list.size() && !may_share)) {
    throw Error(ErrorKind::config,
                str("devices: has no GPU for process ", local_rank, " of this machine (LOCAL_RANK): ",
                    devices.empty() ? str(num_visible, num_visible == 1 ? " is" : " are", " visible")
                                    : str("the list has ", list.size()),
                    " (one for each process; [0, 0] lets two processes share one, which is slow)"));
  }
  const int device = list[place % list.size()];
  if (device < 0 || device >= num_visible)
    throw Error(ErrorKind::backend, str("devices: no device ", device, " (this machine has ", num_visible, ")"));
  return {device, place >= list.size() || std::count(list.begin(), list.end(), device) > 1};
}

}  // namespace stepgraph::nccl
