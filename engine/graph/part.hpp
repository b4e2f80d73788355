#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/base/types.hpp"
#include "engine/graph/rank_list.hpp"

namespace stepgraph {

// The ranks of a communicator, in their order. A communicator is a queue: the operations of a member on it run one
// after another, on whichever lanes they are.
struct Group {
  std::uint32_t id                                   = ~std::uint32_t{0};  // of no graph
  friend bool operator==(const Group&, const Group&) = default;
};

struct GroupSpec {
  std::string name                                           = {};
  RankList ranks                                             = {};
  friend bool operator==(const GroupSpec&, const GroupSpec&) = default;
};

// The place of a rank in the group's order; the number of ranks when it is not a member.
[[nodiscard]] int member_of(const GroupSpec& group, Rank rank);

// The operation of a communication. Tokens aside, `in` are the bytes of the node's reads and accumulates, laid end to
// end in the order of declaration, and `out` those of its writes and accumulates; n is the number of members.
//
//   op              in                                out
//   all_reduce      B bytes                           the reduction: B bytes
//   reduce          B bytes                           the reduction, at the root; no other member writes
//   all_gather      the member's shard                every member's shard, in group order
//   reduce_scatter  a shard for every member          the reduction of the member's shard
//   broadcast       B bytes, at the root              the root's B bytes, on all members (reads of others are ignored)
//   scatter         at the root: one for each member  the member's shard; only the root reads
//   gather          the member's shard                every member's shard, at the root; no other member writes
//   all_to_all      a slice for every member          a slice from every member
//   permute         a message to `peer`               a message from `source`; none of them: no bytes on that side
//   barrier         not used                          not used
//   send, recv      send: a message to `peer`         recv: a message from `peer` (a send's writes and a recv's
//                                                     reads are not used)
//
// Reductions run in group order. All sizes are whole elements of the part's type.
//
// Uneven shards. A side that holds a shard of every member (all_gather's, gather's, all_to_all's out;
// reduce_scatter's, scatter's, all_to_all's in) is cut in one of two ways. With exactly n accesses, each is one
// member's, in group order; sizes may differ and may be 0. With any other number of accesses, they are laid end to end
// and cut into n equal shards. So a member knows every count from its own declaration (engine/graph/shards.hpp).
//
// In place. A part may read and write the same bytes only where the operation leaves that very byte:
//   all_reduce, reduce, broadcast    byte i of `in` is byte i of `out`
//   all_gather, gather's root        `in` is the member's own shard of `out`
//   reduce_scatter, scatter's root   `out` is the member's own shard of `in`
//   all_to_all                       slice k of `in` is slice k of `out`: it is exchanged
//   permute, send, recv              never
// A part must not write a byte twice. A barrier moves nothing and may have any accesses.
enum class PartOp : std::uint8_t {
  all_reduce,
  reduce,
  all_gather,
  reduce_scatter,
  broadcast,
  scatter,
  gather,
  all_to_all,
  permute,
  barrier,
  send,
  recv,
};
[[nodiscard]] std::string_view to_string(PartOp op) noexcept;
[[nodiscard]] constexpr bool point_to_point(PartOp op) noexcept { return op == PartOp::send || op == PartOp::recv; }
[[nodiscard]] constexpr bool reduces(PartOp op) noexcept {
  return op == PartOp::all_reduce || op == PartOp::reduce || op == PartOp::reduce_scatter;
}
[[nodiscard]] constexpr bool has_root(PartOp op) noexcept {
  return op == PartOp::reduce || op == PartOp::broadcast || op == PartOp::scatter || op == PartOp::gather;
}

// One member's share of a communication. Its sizes are those of the node's accesses. The
// k-th operation of a member on a group pairs with the k-th of every other member; the k-th send from a to b pairs with
// the k-th receive. A permutation is one operation of all members, also of those that neither send nor receive.
struct PartSpec {
  Group group         = {};
  PartOp op           = PartOp::barrier;
  Reduction reduction = Reduction::sum;
  DType type          = DType::f32;
  Rank peer           = Rank{-1};  // send, permute: the receiver; recv: the sender. permute: -1 sends nothing
  Rank source         = Rank{-1};  // permute: the sender; -1 receives nothing
  Rank root           = Rank{-1};  // reduce, broadcast, scatter, gather
  std::string message = {};        // names the message; must be equal on all members
  // Position in the rank's issue order; -1: after the parts added before it. Parts of a rank that share a position are
  // issued together (NCCL's group calls): neither waits for the other, as the send and the receive of a ring must not.
  std::int32_t issue = -1;
};

}  // namespace stepgraph
