#pragma once
#include <cstdint>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/run/memory.hpp"

namespace stepgraph {

// A training step written by hand, to show what a graph can say: a stack of tanh layers learns a random teacher, data
// parallel, with every weight cut over all ranks. Before a layer runs, its weights are gathered into one of a few
// slots; after its backward pass its gradient is reduced and scattered. Nothing schedules the overlap: gathering layer
// l + 1 may run beside computing layer l because they touch different slots, and may not run further ahead because the
// next gather writes a slot that is still read.
struct ShardedStepSpec {
  int ranks           = 8;
  int layers          = 4;
  int width           = 64;
  int batch           = 32;  // per rank
  int slots           = 2;   // gathered layers alive at once; likewise gradients
  float learning_rate = 0.3f;
};

struct ShardedStep {
  ShardedStepSpec spec;
  Graph graph;
  std::vector<Buffer> loss                = {};  // per rank: the mean over all ranks
  std::vector<Buffer> inputs              = {};  // per rank
  std::vector<Buffer> targets             = {};  // per rank
  std::vector<std::vector<Buffer>> shards = {};  // [rank][layer]: the rank's part of the layer's weights
  std::vector<std::vector<Node>> gathers  = {};  // [rank][layer]: before the forward pass
  std::vector<std::vector<Node>> forwards = {};  // [rank][layer]
};

[[nodiscard]] ShardedStep sharded_step(const ShardedStepSpec& spec);

// Inputs, targets and first weights, the same bits for every number of ranks that divides the batch and the weights.
void fill(const ShardedStep& step, Memory& memory, std::uint64_t seed);

}  // namespace stepgraph
