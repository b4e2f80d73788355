#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// The parts that meet in one communication: by member; for a message the sender, then the receiver. Compressed rows:
// the nodes of meeting i are nodes[begin[i] .. begin[i + 1]).
struct Matching {
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  std::vector<std::uint32_t> begin{0};
  std::vector<std::uint32_t> nodes;
  std::vector<std::uint32_t> turn;     // by meeting: k, see match_parts
  std::vector<std::uint32_t> of_node;  // the meeting of a node; none: it is not a part. Empty when there are no parts

  [[nodiscard]] std::size_t size() const noexcept { return begin.size() - 1; }
  [[nodiscard]] std::span<const std::uint32_t> meeting(std::size_t i) const {
    return std::span(nodes).subspan(begin[i], begin[i + 1] - begin[i]);
  }
};

// Matches parts as a network does: the k-th operation of a member on a group with the k-th of every other member, the
// k-th send from a to b with the k-th receive. Checks nothing: members may be missing, and operations may differ.
[[nodiscard]] Matching match_parts(const Graph& graph);

// The bytes that a part moves when all ranks share one memory: those it reads and writes, or its cost if that is more.
[[nodiscard]] double bytes_in_shared_memory(const Graph& graph, Node part);

}  // namespace stepgraph
