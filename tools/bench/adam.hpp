#pragma once
#include <cstdint>

namespace stepgraph::bench {

struct AdamOptions {
  std::int64_t elements = 29'500'000;  // 118 MB of f32 parameters: out of every cache
  int threads           = 2;
  int runs              = 15;
  bool dry_run          = false;
  bool json             = false;
};

// Times AdamW on f32, as the node that ends a step, beside a triad a = b + s c over as much memory by the same threads,
// turn by turn in one run. AdamW reads four arrays and writes three, a triad reads two and writes one; both are counted
// so. Answers are checked: a wrong one throws Error(run). Results on stdout.
void adam(const AdamOptions& options);

}  // namespace stepgraph::bench
