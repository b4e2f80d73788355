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

// Times training steps on a device, enqueued as one CUDA graph and node by node, in turn: the time of a step, the time
// until the host has enqueued it, and, in further recorded steps, the share of the time in which the device is idle.
// One model per process, because everything is slower after recording. On loopback only the time of a step. Prints on
// stdout.
void capture(const CaptureOptions& options);

}  // namespace stepgraph::bench
