#pragma once
#include <string>
#include <vector>

namespace stepgraph::bench {

struct CaptureOptions {
  std::vector<std::string> models  = {"124M"};
  std::vector<std::string> layouts = {"1x1x1"};
  std::string backend              = "cuda";
  int steps                        = 20;
  int threads                      = 1;
  bool dry_run                     = false;
  bool json                        = false;
};

// Training steps on a device that are enqueued as one, captured before, and the same steps enqueued node by node: how
// long they take, how long the host is busy until all is enqueued, and for which share of the time the device has
// nothing to do. Results on stdout. Where bodies compute themselves there is nothing to capture or to enqueue: the
// steps alone.
void capture(const CaptureOptions& options);

}  // namespace stepgraph::bench
