#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// Parts that meet in one communication: by member; for a message the sender, then the receiver. Compressed rows: the
// nodes of meeting i are nodes[begin[i] .. begin[i + 1]).
struct Matching {
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  std::vector<std::uint32_t> begin{0};
  std::vector<std::uint32_t> nodes;
  std::vector<std::uint32_t> of_node;  // the meeting of a node; none: it is no part, or on a rank that was left out.
                                       // Empty when there are no parts at all

  [[nodiscard]] std::size_t size() const noexcept { return begin.size() - 1; }
  [[nodiscard]] std::span<const std::uint32_t> meeting(std::size_t i) const {
    return std::span(nodes).subspan(begin[i], begin[i + 1] - begin[i]);
  }
};

// Pairs the parts of those ranks that `is_here` as the network does: the k-th operation of a member on a group with the
// k-th of every other member, the k-th send from a to b with the k-th receive. Checks nothing: a meeting may lack
// members or mix operations.
[[nodiscard]] Matching match_parts(const Graph& graph, const std::function<bool(Rank)>& is_here = {});

// What a part moves where all ranks share one memory: what it reads and writes, or what its cost says if that is more.
[[nodiscard]] double bytes_in_shared_memory(const Graph& graph, Node part);

}  // namespace stepgraph
