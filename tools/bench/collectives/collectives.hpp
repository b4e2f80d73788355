#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace stepgraph::bench {

struct CollectivesOptions {
  std::vector<int> ranks              = {2, 4, 8};
  std::vector<std::string> ops        = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"};
  std::vector<std::string> algorithms = {"direct"};
  std::vector<std::int64_t> sizes     = {4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
  int threads                         = 2;
  int runs                            = 7;
  std::string backend                 = "loopback";  // or gloo, mpi, nccl
  std::vector<int> devices            = {};          // of backend nccl; empty: all
  bool exact                          = false;       // of backend nccl: sums in rank order
  bool dry_run                        = false;
  bool json                           = false;
};

[[nodiscard]] std::vector<std::string> known_collectives();
[[nodiscard]] std::vector<std::string> known_algorithms();

// Times in-place f32 collectives. Over processes: tools/bench/collectives/processes.hpp. On loopback, each is a chain
// in one graph, beside a memcpy with the same threads and amount of memory. The result of each run is checked bit by
// bit; a wrong one throws Error(run). Prints on stdout.
void collectives(const CollectivesOptions& options);

}  // namespace stepgraph::bench
