#pragma once
#include <string>

#include "engine/graph/graph.hpp"

// One rank's part of a communication of a step, as a node with its cost: internal to graphs/.
namespace stepgraph {

struct PartNode {
  std::string name       = {};
  Rank rank              = {};
  LaneKind lane          = LaneKind::reduce;
  Group group            = {};
  PartOp op              = PartOp::all_reduce;
  DType type             = DType::f32;
  Rank peer              = Rank{-1};  // of a message
  Rank root              = Rank{-1};  // of a reduce or broadcast
  std::string message    = {};        // its id; empty: the name
  AccessList reads       = {};
  AccessList writes      = {};
  AccessList accumulates = {};
  std::int64_t bytes     = 0;  // of the message, of the whole tensor that is gathered or scattered, or of the sum
  int members            = 2;  // of the group
  Labels labels          = {};
};
Node add_part(Graph& graph, const PartNode& node);

// The cost of a part, with `bytes` as above. bytes_sent counts what direct algorithms send.
[[nodiscard]] Cost part_cost(PartOp op, std::int64_t bytes, int members, bool is_root = false);

}  // namespace stepgraph
