#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace stepgraph::bench {

struct CopyOptions {
  std::string backend               = "cuda";
  std::int64_t bytes                = 256 << 20;  // of one copy
  int copies                        = 8;          // each way
  std::optional<std::int64_t> width = {};         // of the products; none: 8192 on a device, else 512
  int runs                          = 5;
  int threads                       = 3;
  std::optional<std::string> trace  = {};  // a file for the last run of everything at once
  bool dry_run                      = false;
  bool json                         = false;
};

// Times copies from pinned memory of the host to a device and back, as nodes of lanes h2d and d2h: each way alone, both
// at once, and both while products of bf16 run on the compute lane, which are timed alone too. Times are the device's.
// What was copied is compared with what it was copied from: Error(run) where it differs. Results on stdout.
void copy(const CopyOptions& options);

}  // namespace stepgraph::bench
