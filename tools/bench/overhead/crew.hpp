#pragma once
#include <vector>

namespace stepgraph::bench {

struct CrewOptions {
  std::vector<int> threads = {2};
  std::vector<int> ranks   = {1, 2, 8};  // each runs kernels of its own, one after the other
  int runs                 = 9;
  bool dry_run             = false;
  bool json                = false;
};

// Shares out the tiles of kernels in three ways, in turn: Context::parallel_for, and tbb::parallel_for in a task arena
// with a static and with an affinity partitioner. Checks that each tile ran once. Prints on stdout.
void crew(const CrewOptions& options);

}  // namespace stepgraph::bench
