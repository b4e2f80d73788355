#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/run/memory.hpp"
#include "ops/transfers/collectives.hpp"

namespace stepgraph::testing {

struct OneCollectiveOptions {
  PartOp op                = PartOp::all_reduce;
  int ranks                = 4;  // of the graph; all of them are members unless `members` says otherwise
  std::vector<int> members = {};
  std::int64_t elements    = 64;  // of the side that holds everything, rounded up to whole shards where shards are even
  DType type               = DType::f32;
  Reduction reduction      = Reduction::sum;
  int root                 = 0;  // a rank
  bool in_place            = false;
  bool uneven              = false;  // all_gather, reduce_scatter: later members have more; the first has nothing
  int repeats              = 1;      // runs on the same buffers, one after another
  LaneKind lane            = LaneKind::reduce;
};

// A graph with one collective and nothing else. Buffers are persistent. Inputs are filled with small integers that
// depend on rank and position.
struct OneCollective {
  Graph graph;
  std::vector<Buffer> in, out;  // by member; in place: the same
  void fill(Memory& memory) const;
  [[nodiscard]] std::vector<std::byte> contents(const Memory& memory) const;  // of every member's `out`
};
[[nodiscard]] OneCollective one_collective(const OneCollectiveOptions& options);

}  // namespace stepgraph::testing
