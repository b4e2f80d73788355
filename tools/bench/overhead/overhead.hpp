#pragma once
#include <cstdint>
#include <vector>

namespace stepgraph::bench {

struct OverheadOptions {
  std::vector<int> threads               = {2};  // graphs are run with each number in turn
  std::uint32_t nodes                    = 50'000;
  int pairs                              = 21;
  std::vector<std::uint32_t> build_nodes = {10'000, 100'000, 1'000'000};
  bool dry_run                           = false;
  bool json                              = false;
};

// Runs empty graphs of four shapes with an Executor and with plain Taskflow, in turn, then with and without a recorder,
// in turn, and builds graphs of several sizes. Checks that each body ran once and that recorded times respect the
// edges. Prints on stdout.
void overhead(const OverheadOptions& options);

}  // namespace stepgraph::bench
