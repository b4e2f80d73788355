#pragma once
#include <cstdint>
#include <vector>

#include "engine/graph.hpp"
#include "graphs/step_run.hpp"

// Data-parallel ranks must hold the same bits before the first step, or they train different models. Nothing of this is
// in a step: it is a graph of its own, which runs once, on the step's memory.
namespace stepgraph {

// What is in a rank's weights, as a graph: of everything that data-parallel ranks each have whole (values, masters and
// the optimizer's state of every weight) a hash, ops/hash.hpp's. The hashes are gathered over each data-parallel group,
// and a node of every rank compares them: where one differs from the first member's, the run fails and names weight and
// rank. `broadcast` puts a broadcast from that first member (dp 0, with the rank's own tp and pp) before each.
struct WeightsGraph {
  Graph graph;
  std::vector<SameBytes> same = {};  // its buffers that are the step's
  std::vector<Buffer> hashes  = {};  // by rank: i64, persistent; of no graph where a rank has nothing, or is elsewhere
};
struct WeightsGraphOptions {
  bool broadcast = true;
};
[[nodiscard]] WeightsGraph weights_graph(const StepGraph& step, const WeightsGraphOptions& options = {});

// Makes every data-parallel rank's weights those of the first, and checks that they are; or only checks. To be called
// between steps. Both return a hash of what one replica holds, which depends on the layout's tp and pp as well.
std::uint64_t broadcast_weights(StepRun& run);
std::uint64_t check_weights(StepRun& run);

}  // namespace stepgraph
