#pragma once
#include <cstdint>
#include <vector>

#include "engine/graph/graph.hpp"
#include "graphs/train/step_run.hpp"

// Data-parallel ranks must hold the same bits before the first step, or they train different models. Nothing of this is
// in a step: it is a graph of its own, which runs once, on the step's memory.
namespace stepgraph {

// What is in a rank's weights, as a graph: of everything that data-parallel ranks each have (values, masters and the
// optimizer's state of every weight) a hash, ops/hash.hpp's. What they have whole is the same on all of them; a shard
// is the same where hybrid sharding has several groups, on the ranks that have the same place in one. The hashes are
// gathered over those ranks, and a node of every rank compares them: where one differs from the first member's, the run
// fails and names weight and rank. `broadcast` puts a broadcast from that first member (the lowest dp, with the rank's
// own tp and pp) before each.
struct WeightsGraph {
  Graph graph;
  std::vector<SameBytes> same = {};  // its buffers that are the step's
  std::vector<Buffer> hashes  = {};  // by rank: i64, persistent; of no graph where a rank has nothing, or is elsewhere
  std::vector<Buffer> shard_hashes = {};  // the same of shards that several ranks have
};
struct WeightsGraphOptions {
  bool broadcast = true;
};
[[nodiscard]] WeightsGraph weights_graph(const StepGraph& step, const WeightsGraphOptions& options = {});

// Makes what every data-parallel rank has of the weights what the first that has it has, and checks that it is; or only
// checks. To be called between steps. Both return a hash of what was compared, of one replica of it, which depends on
// how the layout and sharding cut it as well.
std::uint64_t broadcast_weights(StepRun& run);
std::uint64_t check_weights(StepRun& run);

}  // namespace stepgraph
