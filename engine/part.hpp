#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/types.hpp"

namespace stepgraph {

// The ranks of a communicator, in their order. A communicator is a queue: each member's operations on it run one
// after another, whatever lanes they are on.
struct Group {
  std::uint32_t id                                   = ~std::uint32_t{0};  // of no graph
  friend bool operator==(const Group&, const Group&) = default;
};

struct GroupSpec {
  std::string name                                           = {};
  std::vector<Rank> ranks                                    = {};
  friend bool operator==(const GroupSpec&, const GroupSpec&) = default;
};

enum class PartOp : std::uint8_t { all_reduce, all_gather, reduce_scatter, broadcast, barrier, send, recv };
[[nodiscard]] std::string_view to_string(PartOp op) noexcept;
[[nodiscard]] constexpr bool point_to_point(PartOp op) noexcept { return op == PartOp::send || op == PartOp::recv; }

enum class Reduction : std::uint8_t { sum, average, min, max, product };
[[nodiscard]] std::string_view to_string(Reduction reduction) noexcept;

// One member's share of a communication. What it sends are the node's reads, what it receives are the node's writes
// (tokens aside), so sizes are never declared twice. The k-th operation of a member on a group pairs with the k-th of
// every other member; the k-th send from a to b pairs with the k-th receive.
struct PartSpec {
  Group group         = {};
  PartOp op           = PartOp::barrier;
  Reduction reduction = Reduction::sum;
  DType type          = DType::f32;
  Rank peer           = Rank{-1};  // send: to whom; recv: from whom
  Rank root           = Rank{-1};  // broadcast: from whom
  std::string message = {};        // names the message; must be equal on all members
  // Place in the rank's issue order; -1: after the parts added before it. Parts of a rank that share a place are issued
  // together (NCCL's group calls): neither waits for the other, as a ring's send and receive must not.
  std::int32_t issue = -1;
};

}  // namespace stepgraph
