#pragma once
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"
#include "graphs/step/shard_units.hpp"

// Nodes that gather a unit from its shards and reduce-scatter it into them, on one rank: internal to graphs/.
namespace stepgraph {

// One member of a communicator.
struct Member {
  Rank rank     = {};
  Group group   = {};
  int size      = 1;  // members
  int index     = 0;
  LaneKind lane = LaneKind::gather;
};

// Where a member's shards of a unit are: of the flat, and of each weight beside it, in the order of the unit.
struct UnitShards {
  Access flat                = {};
  std::vector<Access> others = {};  // without a buffer where the member's shard is empty
};

// Names and labels of the nodes, and tokens that order them.
struct UnitText {
  std::string name                = {};  // "F layer3 mb0"
  std::vector<std::string> others = {};  // the names of weights beside the flat
  Labels labels                   = {};
  AccessList after                = {};  // tokens that the nodes read
};

// Gathers all members' shards into `whole`, which has the layout of the unit. The shards may lie in it.
void gather_unit(Graph& graph, const Member& member, const ShardUnit& unit, DType type, const UnitShards& from,
                 Buffer whole, const UnitText& text);
// Sums all members' wholes; the member gets its shard of the sum. The last node also writes `done`.
void reduce_scatter_unit(Graph& graph, const Member& member, const ShardUnit& unit, DType type, Buffer whole,
                         const UnitShards& to, const UnitText& text, const AccessList& done = {});
// Clears the padding at the end of a whole flat.
void clear_padding(Graph& graph, const ShardUnit& unit, DType type, Buffer whole, const Labels& labels);

// Where the shards of `member` lie in a whole unit.
[[nodiscard]] UnitShards shards_in_whole(const ShardUnit& unit, DType type, Buffer whole, int member);

}  // namespace stepgraph
