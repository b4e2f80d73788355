#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"

// The collectives of `stepgraph bench collectives`: how to add each to a graph, and its result.
namespace stepgraph::bench {

// A chain of one collective on one buffer per rank (a permutation alternates between two). Values are small integers in
// floats, and each operation changes them by integers or powers of two, so the result is exact.
struct Chain {
  int num_ranks;
  std::int64_t elements;  // of a rank's buffer; divisible by num_ranks
  int length;             // operations
  double growth;          // num_ranks to the power of length - 1: the growth of all_reduce after its first operation

  [[nodiscard]] std::int64_t shard() const { return elements / num_ranks; }
};
[[nodiscard]] Buffer chain_buffer(Graph& graph, Rank rank, const Chain& chain);

struct CollectiveCase {
  std::string name;
  double (*bus_factor)(double n);    // busbw / algbw, as nccl-tests has it
  int (*max_length)(int num_ranks);  // the longest chain with exact values
  void (*add)(Graph& graph, Group group, const std::vector<Buffer>& x,
              const std::vector<Buffer>& y);                         // x to y, or in x
  double (*expected)(const Chain& chain, int rank, std::int64_t i);  // before start_scale
  bool alternates = false;                                           // between x and y
  bool doubles    = false;  // values grow by a factor of num_ranks at each step
};

[[nodiscard]] const std::vector<CollectiveCase>& collective_cases();

// The first values of a buffer: an integer from 1 to 64, times start_scale.
[[nodiscard]] inline int start_value(int rank, std::int64_t i) {
  return static_cast<int>((i * 7 + rank * 13) & 63) + 1;
}
[[nodiscard]] double start_scale(const CollectiveCase& what, int num_ranks);

}  // namespace stepgraph::bench
