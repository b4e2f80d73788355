#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// One communication of a group, before it is split into one part per member. `in` and `out` return each member's bytes
// as an Access, a Buffer or a list of accesses; engine/graph/part.hpp defines their meaning and how shards are cut.
// They are not called for members that have no such side.
struct Collective {
  std::string name                    = {};  // also the message id
  Group group                         = {};
  LaneKind lane                       = LaneKind::reduce;
  std::optional<DType> type           = {};  // of the elements; none: the type of the buffers
  std::function<AccessList(Rank)> in  = {};
  std::function<AccessList(Rank)> out = {};
  Reduction reduction                 = Reduction::sum;
  Rank root                           = Rank{-1};
  std::function<Rank(Rank)> peer      = {};  // permute: the rank each member sends to; -1: it sends nothing
  Labels labels                       = {};
};

// Each function adds one part per member, in group order (in a graph of one rank: only that rank's part), and returns
// the nodes. Costs: bytes_moved is what the part reads and writes; bytes_sent is what it sends if every member sends
// its bytes directly to every member that needs them.
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
  std::optional<DType> type       = {};  // of the elements; none: the type of the buffers
  std::function<AccessList()> in  = {};  // the sender's bytes
  std::function<AccessList()> out = {};  // the receiver's bytes
  Labels labels                   = {};
};

// Adds the sender's and the receiver's part (in a graph of one rank: only that rank's part) and returns the nodes.
std::vector<Node> send_recv(Graph& graph, const Message& message);

}  // namespace stepgraph
