#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace stepgraph::bench {

struct CopyOptions {
  std::string backend               = "cuda";
  std::int64_t bytes                = 256 << 20;  // of one copy
  int copies                        = 8;          // in each direction
  std::optional<std::int64_t> width = {};         // rows and columns of the matrices; none: 8192 on a device, else 512
  int runs                          = 5;
  int threads                       = 3;
  std::optional<std::string> trace  = {};  // a file for the times of the last run with all three lanes
  bool dry_run                      = false;
  bool json                         = false;
};

// Times copies between pinned host memory and a device, as nodes of lanes h2d and d2h: each direction alone, both at
// once, and both during bf16 matrix products on the compute lane, which are also timed alone. Times come from the
// device's clock. Copies are compared with their source; a difference throws Error(run). Prints on stdout.
void copy(const CopyOptions& options);

}  // namespace stepgraph::bench
