#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// One communication of a group, before it is cut into one part per member. `in` and `out` give each member's bytes, as
// an Access, a Buffer or a list of accesses; what they mean and how shards are cut says engine/graph/part.hpp. A member
// that has no such side is not asked.
struct Collective {
  std::string name                    = {};  // also the message id
  Group group                         = {};
  LaneKind lane                       = LaneKind::reduce;
  std::optional<DType> type           = {};  // of the elements; none: the buffers'
  std::function<AccessList(Rank)> in  = {};
  std::function<AccessList(Rank)> out = {};
  Reduction reduction                 = Reduction::sum;
  Rank root                           = Rank{-1};
  std::function<Rank(Rank)> peer      = {};  // permute: to whom each member sends; -1: to nobody
  Labels labels                       = {};
};

// Each adds one part per member, in group order (in a graph of one rank: that member's), and returns the nodes. Costs:
// bytes_moved is what the part reads and writes, bytes_sent what it sends when every member sends its bytes straight to
// everybody who needs them.
std::vector<Node> all_reduce(Graph& graph, const Collective& spec);      // no out: in place
std::vector<Node> reduce(Graph& graph, const Collective& spec);          // no out: in place, at the root
std::vector<Node> all_gather(Graph& graph, const Collective& spec);      // no in: in place, from its shard of out
std::vector<Node> reduce_scatter(Graph& graph, const Collective& spec);  // no out: in place, into its shard of in
std::vector<Node> broadcast(Graph& graph, const Collective& spec);       // no in: in place, from the root's out
std::vector<Node> scatter(Graph& graph, const Collective& spec);
std::vector<Node> gather(Graph& graph, const Collective& spec);
std::vector<Node> all_to_all(Graph& graph, const Collective& spec);  // no out: in place, slices are exchanged
std::vector<Node> permute(Graph& graph, const Collective& spec);
std::vector<Node> barrier(Graph& graph, const Collective& spec);

// One message between two ranks of a group.
struct Message {
  std::string name                = {};  // also the message id
  Group group                     = {};
  Rank from                       = {};
  Rank to                         = {};
  LaneKind send_lane              = LaneKind::pp_send;
  LaneKind recv_lane              = LaneKind::pp_recv;
  std::optional<DType> type       = {};  // of the elements; none: the buffers'
  std::function<AccessList()> in  = {};  // the sender's bytes
  std::function<AccessList()> out = {};  // the receiver's
  Labels labels                   = {};
};

// Adds the sender's and the receiver's part (in a graph of one rank: its own), and returns the nodes.
std::vector<Node> send_recv(Graph& graph, const Message& message);

}  // namespace stepgraph
