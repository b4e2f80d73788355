#pragma once
#include <cstdint>
#include <vector>

namespace stepgraph::bench {

struct OverheadOptions {
  int threads                            = 2;
  std::uint32_t nodes                    = 50'000;
  int pairs                              = 21;
  std::vector<std::uint32_t> build_nodes = {10'000, 100'000, 1'000'000};
  bool dry_run                           = false;
  bool json                              = false;
};

// Runs empty graphs of four shapes on an Executor and as plain Taskflow, alternating; with and without a
// recorder, alternating; and builds graphs of several sizes. Every run is checked: each body must have run once, and
// recorded times must respect the edges. Results on stdout.
void overhead(const OverheadOptions& options);

}  // namespace stepgraph::bench
