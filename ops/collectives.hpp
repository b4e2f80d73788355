#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/graph.hpp"

namespace stepgraph {

// One communication of a group, before it is cut into one part per member. `in` and `out` give each member's bytes.
struct Collective {
  std::string name                = {};  // also the message id
  Group group                     = {};
  LaneKind lane                   = LaneKind::reduce;
  std::optional<DType> type       = {};  // of the elements; none: the buffers'
  std::function<Access(Rank)> in  = {};
  std::function<Access(Rank)> out = {};  // none: in place, where that makes sense
  Reduction reduction             = Reduction::sum;
  Rank root                       = Rank{-1};
  Labels labels                   = {};
};

// Each adds one part per member, in group order (in a graph of one rank: that member's), and returns the nodes.
std::vector<Node> all_reduce(Graph& graph, const Collective& spec);      // in: all bytes; out: their reduction
std::vector<Node> all_gather(Graph& graph, const Collective& spec);      // in: a shard; out: all shards, in group order
std::vector<Node> reduce_scatter(Graph& graph, const Collective& spec);  // in: all bytes; out: a shard of the reduction
std::vector<Node> broadcast(Graph& graph, const Collective& spec);  // in: the root's bytes (asked of it alone); out
std::vector<Node> barrier(Graph& graph, const Collective& spec);    // no bytes

// One message between two ranks of a group.
struct Message {
  std::string name            = {};  // also the message id
  Group group                 = {};
  Rank from                   = {};
  Rank to                     = {};
  LaneKind send_lane          = LaneKind::pp_send;
  LaneKind recv_lane          = LaneKind::pp_recv;
  std::optional<DType> type   = {};  // of the elements; none: the buffers'
  std::function<Access()> in  = {};  // the sender's bytes
  std::function<Access()> out = {};  // the receiver's
  Labels labels               = {};
};

// Adds the sender's and the receiver's part (in a graph of one rank: its own), and returns the nodes.
std::vector<Node> send_recv(Graph& graph, const Message& message);

}  // namespace stepgraph
