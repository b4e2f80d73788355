#include "engine/run/threads/first_touch.hpp"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <thread>

namespace stepgraph {
namespace {

// The offset of the first byte of each node's part of `size` bytes, and `size`.
std::vector<std::size_t> parts_of(std::size_t size, std::span<const NumaNode> nodes) {
  const auto total = static_cast<std::size_t>(num_processors(nodes));
  std::size_t sum  = 0;
  std::vector<std::size_t> begins;
  for (const NumaNode& node : nodes) {
    begins.push_back(size / total * sum + size % total * sum / total);
    sum += node.processors.size();
  }
  begins.push_back(size);
  return begins;
}

// Zeroing pages takes one thread about a second for some gigabytes.
std::size_t num_touching(std::size_t size, const NumaNode& node) {
  constexpr std::size_t size_for_each = std::size_t{64} << 20;
  return std::clamp<std::size_t>(size / size_for_each, 1, node.processors.size());
}

}  // namespace

std::vector<int> nodes_of_pages(std::size_t size, std::size_t page, std::span<const TouchedBytes> buffers,
                                std::span<const NumaNode> nodes) {
  std::vector<int> found((size + page - 1) / page, 0);
  if (nodes.size() == 1) return found;
  std::vector<TouchedBytes> by_size(buffers.begin(), buffers.end());
  std::stable_sort(by_size.begin(), by_size.end(),
                   [](const TouchedBytes& a, const TouchedBytes& b) { return a.size < b.size; });
  for (const TouchedBytes& buffer : by_size) {
    const std::vector<std::size_t> begins = parts_of(buffer.size, nodes);
    for (std::size_t node = 0; node + 1 < begins.size(); ++node) {
      if (begins[node] == begins[node + 1]) continue;
      // The page in which a part ends belongs to that part.
      const std::size_t first = node == 0 ? buffer.offset / page : (buffer.offset + begins[node] + page - 1) / page;
      const std::size_t last  = (buffer.offset + begins[node + 1] + page - 1) / page;
      for (std::size_t i = first; i < std::min(last, found.size()); ++i) found[i] = static_cast<int>(node);
    }
  }
  return found;
}

void touch_first(std::span<std::byte> zeroed, std::size_t page, std::span<const int> nodes_of_pages,
                 std::span<const NumaNode> nodes) noexcept {
  std::vector<Affinity> affinities;
  const auto touch = [&](std::size_t node, std::size_t first, std::size_t last) noexcept {
    affinities[node].apply_to(0);
    for (std::size_t i = first; i < last; ++i) {
      if (nodes_of_pages[i] != static_cast<int>(node)) continue;
      // Volatile: the compiler must not drop a write of the value that memory has already.
      *static_cast<volatile std::byte*>(zeroed.data() + i * page) = std::byte{0};
    }
  };
  const std::size_t num_pages = nodes_of_pages.size();
  try {
    for (const NumaNode& node : nodes) affinities.emplace_back(node.processors);
    std::vector<std::jthread> threads;
    for (std::size_t node = 0; node < nodes.size(); ++node) {
      const std::size_t count = num_touching(zeroed.size() / nodes.size(), nodes[node]);
      for (std::size_t i = 0; i < count; ++i)
        threads.emplace_back(touch, node, num_pages * i / count, num_pages * (i + 1) / count);
    }
  } catch (const std::exception&) {
    // Such pages lie where the thread runs that writes to them first.
  }
}

void place_pages(const FreshArena& arena, const RankSet& ranks, std::span<const NumaNode> nodes) {
  const auto i = ranks.place(arena.rank);
  if (!i) return;
  const NodeRange own = nodes_of_rank(static_cast<int>(*i), static_cast<int>(ranks.size()), nodes);
  const auto its      = nodes.subspan(static_cast<std::size_t>(own.first), static_cast<std::size_t>(own.count));
  const auto page     = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  touch_first({arena.begin, arena.size}, page, nodes_of_pages(arena.size, page, arena.buffers, its), its);
}

}  // namespace stepgraph
