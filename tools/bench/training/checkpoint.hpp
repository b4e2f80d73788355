#pragma once
#include <string>

namespace stepgraph::bench {

struct CheckpointBenchOptions {
  std::string model  = "M";
  std::string layout = "1x1x1";
  std::string folder = ".";  // on the disk to be measured
  int runs           = 3;
  int steps          = 0;   // with and without checkpoints, in turn; 0: none
  int every          = 10;  // steps between checkpoints
  int threads        = 2;
  bool dry_run       = false;
  bool json          = false;
};

// Times saving and loading a checkpoint beside a plain writer: one thread that writes as many bytes from one buffer
// with O_DIRECT, 8 MiB at a time, and syncs. Then times steps with asynchronous checkpoints against steps without.
// Loaded weights are compared with those that were saved; a difference throws Error(run). Files are removed again.
void checkpoint(const CheckpointBenchOptions& options);

}  // namespace stepgraph::bench
