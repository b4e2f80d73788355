#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "engine/base/types.hpp"
#include "engine/graph/rank_set.hpp"
#include "engine/run/threads/numa_places.hpp"

// Where the pages of a rank's memory lie: internal to engine/. Linux puts a page on the NUMA node of the thread that
// writes to it first.
namespace stepgraph {

// A buffer in an arena.
struct TouchedBytes {
  std::size_t offset = 0, size = 0;
};

// By page of an arena: its place in `nodes`. Kernels share out their tiles to the threads of one node after another, so
// each node has a part of each buffer, in their order and by their processors. For a page with several buffers the
// largest of them counts. Pages without buffers are on the first node.
[[nodiscard]] std::vector<int> nodes_of_pages(std::size_t size, std::size_t page, std::span<const TouchedBytes> buffers,
                                              std::span<const NumaNode> nodes);

// Writes to all pages of zeroed bytes, which begin at a page boundary, each from a thread of the page's node. If a
// thread cannot be started, its pages stay untouched.
void touch_first(std::span<std::byte> zeroed, std::size_t page, std::span<const int> nodes_of_pages,
                 std::span<const NumaNode> nodes) noexcept;

// A rank's memory that no thread has written to.
struct FreshArena {
  Rank rank                         = {};
  std::byte* begin                  = nullptr;  // of a page
  std::size_t size                  = 0;
  std::vector<TouchedBytes> buffers = {};
};

// Puts the pages of an arena on the nodes of its rank, which is one of the ranks of this process.
void place_pages(const FreshArena& arena, const RankSet& ranks, std::span<const NumaNode> nodes);

}  // namespace stepgraph
