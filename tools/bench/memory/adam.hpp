#pragma once
#include <cstdint>
#include <string>

namespace stepgraph::bench {

struct AdamOptions {
  std::int64_t elements = 29'500'000;  // 118 MB of f32 parameters: larger than caches
  int threads           = 2;
  int runs              = 15;
  bool copies           = false;       // also beside copies in both directions
  std::string backend   = "loopback";  // of the copies
  bool dry_run          = false;
  bool json             = false;
};

// Times the AdamW op on f32 and, in turn, a triad a = b + s c over the same amount of memory with the same threads.
// AdamW reads four arrays and writes three; a triad reads two and writes one. Wrong results throw Error(run). Prints on
// stdout.
// With `copies`: also AdamW as a node of the host lane, alone and while copies between pinned and device memory run in
// both directions.
void adam(const AdamOptions& options);

}  // namespace stepgraph::bench
