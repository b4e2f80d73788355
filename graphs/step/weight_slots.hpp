#pragma once
#include <functional>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"
#include "graphs/plan/shard_plan.hpp"
#include "graphs/step/shard_nodes.hpp"

// Memory for what is whole only while it is used: a pass over a step's graph, internal to graphs/.
//
// A step is first built as if every unit's weights were whole, in a buffer that nobody writes; and, where gradients are
// reduced after every microbatch, as if each microbatch had room for all of them. The pass finds out when each of these
// buffers is in use, gives it a slot for that time, and adds the nodes that fill and empty it. A slot is a buffer like
// any other: that the next tenant waits for the last reader of the one before it, and may come as early as that, is
// what its accesses say.
namespace stepgraph {

// Weights of a unit on one rank.
struct UnitValues {
  Buffer whole            = {};  // that is read and has no memory yet
  std::string unit        = {};
  std::int64_t size_bytes = 0;
  DType type              = DType::f32;
  // Adds the nodes that fill a slot; each also reads `after`.
  using Gather  = std::function<void(Graph&, Buffer slot, const Labels&, const AccessList& after)>;
  Gather gather = {};
  // Where a smaller group keeps what was gathered for the forward pass: adds the nodes that keep it and returns where;
  // and adds those that gather it again from there.
  std::function<UnitShards(Graph&, Buffer slot, const Labels&)> keep = {};
  std::function<void(Graph&, const UnitShards& kept, Buffer slot, const Labels&, const AccessList& after)> gather_kept =
      {};
};

// Gradients of a unit and a microbatch on one rank.
struct UnitGradients {
  Buffer whole            = {};  // that is written and has no memory yet
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

// Nodes of these ops mark where a stage's weights begin and cease to be kept whole; the pass takes them out.
inline constexpr std::string_view unshard_mark = "unshard";
inline constexpr std::string_view reshard_mark = "reshard";

[[nodiscard]] Graph with_slots(const Graph& graph, const SlotPlan& slots, const ShardPlan& plan);

}  // namespace stepgraph
