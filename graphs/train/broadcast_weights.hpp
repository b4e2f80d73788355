#pragma once
#include <cstdint>
#include <vector>

#include "engine/graph/graph.hpp"
#include "graphs/train/step_run.hpp"

// Data-parallel ranks must hold the same bits before the first step, or they train different models. This is a graph of
// its own, which runs once on the step's memory.
namespace stepgraph {

// A graph that hashes (ops/transfers/hash.hpp) and compares all weights and optimizer state that several data-parallel
// ranks have: whole tensors on all of them; with hybrid sharding also shards, on the ranks at the same place in their
// shard groups. The hashes are gathered over those ranks, and a node of every rank compares them with the first
// member's. Where one differs, the run fails and names weight and rank. With `broadcast`, the first member (the lowest
// dp, with the rank's tp and pp) broadcasts each tensor before.
struct WeightsGraph {
  Graph graph;
  std::vector<SameBytes> same = {};  // its buffers that use the step's bytes
  std::vector<Buffer> hashes  = {};  // by place in the step's ranks: i64, persistent; Buffer{}: the rank has nothing
  std::vector<Buffer> shard_hashes = {};  // the same for shards
};
struct WeightsGraphOptions {
  bool broadcast = true;
};
[[nodiscard]] WeightsGraph weights_graph(const StepGraph& step, const WeightsGraphOptions& options = {});

// Broadcasts weights and optimizer state from the first data-parallel rank that has them, and checks that all ranks are
// equal; or only checks. To be called between steps. Collective. Both return a hash of one replica of the compared
// bytes, which also depends on layout and sharding.
std::uint64_t broadcast_weights(StepRun& run);
std::uint64_t check_weights(StepRun& run);

}  // namespace stepgraph
