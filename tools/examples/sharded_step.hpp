#pragma once
#include <cstdint>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/run/memory.hpp"

namespace stepgraph {

// A hand-written training step, as an example of a graph: a stack of tanh layers learns a random teacher network, data
// parallel, with each weight sharded over all ranks. Before a layer runs, an all-gather writes its weights into one of
// a few slots. After its backward pass its gradient is reduce-scattered. No code schedules the overlap: the gather of
// layer l + 1 can run during the computation of layer l because they use different slots, and it cannot run further
// ahead because the next gather writes a slot that is still read.
struct ShardedStepSpec {
  int ranks           = 8;
  int layers          = 4;
  int width           = 64;
  int batch           = 32;  // per rank
  int slots           = 2;   // gathered layers in memory at the same time; likewise gradients
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

// Sets inputs, targets and first weights: the same bits for every number of ranks that divides the batch and the
// weights.
void fill(const ShardedStep& step, Memory& memory, std::uint64_t seed);

}  // namespace stepgraph
