#pragma once
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"
#include "graphs/step/shard_units.hpp"

// Nodes that move a unit between its whole and its parts, on one rank: internal to graphs/.
namespace stepgraph {

// One member of a communicator.
struct Member {
  Rank rank     = {};
  Group group   = {};
  int size      = 1;  // members
  int index     = 0;
  LaneKind lane = LaneKind::gather;
};

// Where a member's parts of a unit are: of the flat, and of each weight beside it, in the order of the unit.
struct UnitShards {
  Access flat                = {};
  std::vector<Access> others = {};  // of no bytes where the member has none of it
};

// What nodes are called by, and what they say beside that.
struct UnitText {
  std::string name                = {};  // "F layer3 mb0"
  std::vector<std::string> others = {};  // the names of weights beside the flat
  Labels labels                   = {};
  AccessList after                = {};  // tokens that they read
};

// whole = all members' parts. The whole is laid out as the unit is; it may lie over the parts.
void gather_unit(Graph& graph, const Member& member, const ShardUnit& unit, DType type, const UnitShards& from,
                 Buffer whole, const UnitText& text);
// parts = the member's share of the sum of all members' wholes. `done`: a token that the last of them writes.
void reduce_scatter_unit(Graph& graph, const Member& member, const ShardUnit& unit, DType type, Buffer whole,
                         const UnitShards& to, const UnitText& text, const AccessList& done = {});
// Zeros where the whole of a flat is longer than its weights.
void clear_padding(Graph& graph, const ShardUnit& unit, DType type, Buffer whole, const Labels& labels);

// The parts of `member` as they lie in a whole.
[[nodiscard]] UnitShards shards_in_whole(const ShardUnit& unit, DType type, Buffer whole, int member);

}  // namespace stepgraph
