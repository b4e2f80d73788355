#pragma once
#include <string>

namespace stepgraph::bench {

struct CaptureOptions {
  std::string model   = "124M";
  std::string layout  = "1x1x1";
  std::string backend = "cuda";
  int steps           = 20;
  bool dry_run        = false;
  bool json           = false;
};

// Training steps on a device that are enqueued as one, captured before, in turn with the same steps enqueued node by
// node: how long they take, how long the host is busy until all is enqueued, and, in more steps that are recorded, for
// which share of the time the device has nothing to do. One model: once something was recorded, nothing is as fast as
// before. Results on stdout. Where bodies compute themselves nothing is enqueued: the steps alone.
void capture(const CaptureOptions& options);

}  // namespace stepgraph::bench
