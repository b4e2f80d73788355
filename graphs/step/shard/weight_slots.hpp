#pragma once
#include <functional>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"
#include "graphs/plan/shard_plan.hpp"
#include "graphs/step/shard/shard_nodes.hpp"

// Memory for tensors that are whole only while they are used: a pass over a step's graph, internal to graphs/.
//
// The builder first gives every unit one buffer for its whole weights, which no node writes. With ReduceWhen::each, it
// gives every unit and microbatch one buffer for whole gradients. The pass finds the nodes between which each of these
// buffers is in use, replaces it there by a slot, and adds the nodes that fill and empty the slot. A slot is a buffer
// like any other: its accesses make the next tenant wait for the last reader of the tenant before it, and for nothing
// else.
namespace stepgraph {

// Weights of a unit on one rank.
struct UnitValues {
  Buffer whole            = {};  // nodes read it; it is replaced by slots
  std::string unit        = {};
  std::int64_t size_bytes = 0;
  DType type              = DType::f32;
  // Adds the nodes that fill a slot; each also reads `after`.
  using Gather  = std::function<void(Graph&, Buffer slot, const Labels&, const AccessList& after)>;
  Gather gather = {};
  // Where a smaller group keeps the weights that were gathered for the forward pass: `keep` adds the nodes that copy
  // the rank's shard and returns where it is; `gather_kept` adds the nodes that gather the weights from such shards.
  std::function<UnitShards(Graph&, Buffer slot, const Labels&)> keep = {};
  std::function<void(Graph&, const UnitShards& kept, Buffer slot, const Labels&, const AccessList& after)> gather_kept =
      {};
};

// Gradients of a unit and a microbatch on one rank.
struct UnitGradients {
  Buffer whole            = {};  // nodes write it; it is replaced by slots
  std::string unit        = {};
  std::int64_t size_bytes = 0;
  DType type              = DType::f32;
  // Adds the nodes that empty a slot; the last that reads it also writes `done`.
  std::function<void(Graph&, Buffer slot, const AccessList& done)> reduce = {};
};

struct SlotPlan {
  std::vector<UnitValues> values       = {};
  std::vector<UnitGradients> gradients = {};
};

// Nodes with these ops mark where a stage's weights begin and end to stay gathered. The pass removes them.
inline constexpr std::string_view unshard_mark = "unshard";
inline constexpr std::string_view reshard_mark = "reshard";

[[nodiscard]] Graph with_slots(const Graph& graph, const SlotPlan& slots, const ShardPlan& plan);

}  // namespace stepgraph
