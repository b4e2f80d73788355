#include "engine/memory.hpp"

#include <sys/mman.h>

#include <cstdlib>

namespace stepgraph {
namespace {

constexpr std::int64_t alignment = 64;  // a cache line: neighbours do not share one

std::int64_t aligned(std::int64_t size) { return (size + alignment - 1) / alignment * alignment; }

// Streams through large memory are half as fast again when its pages are large. Advice: nothing depends on it.
void prefer_large_pages(std::byte* block, std::size_t size) {
  constexpr std::size_t large = std::size_t{2} << 20, page = 4096;
  if (size < 2 * large) return;
  const std::size_t skip = (page - reinterpret_cast<std::uintptr_t>(block) % page) % page;
  (void)madvise(block + skip, (size - skip) / page * page, MADV_HUGEPAGE);
}

std::int64_t bytes_needed(const BufferSpec& spec) { return spec.token ? 0 : spec.size_bytes; }

}  // namespace

void Memory::Free::operator()(std::byte* block) const noexcept { std::free(block); }

Memory::Memory(const Graph& graph) : arena_sizes_(static_cast<std::size_t>(graph.num_ranks()), 0) {
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& spec = graph.spec(Buffer{i});
    if (spec.space == Space::disk) {
      throw Error(ErrorKind::config, str("memory: ", graph.describe(Buffer{i}), " of rank ", spec.rank,
                                         " lives on disk, which this memory cannot hold (use space device or pinned)"));
    }
    arena_sizes_[static_cast<std::size_t>(index(spec.rank))] += aligned(bytes_needed(spec));
  }
  std::vector<std::byte*> next;
  for (std::size_t rank = 0; rank < arena_sizes_.size(); ++rank) {
    const auto size = static_cast<std::size_t>(arena_sizes_[rank]) + alignment;
    arenas_.emplace_back(static_cast<std::byte*>(std::calloc(size, 1)));  // zero pages: untouched bytes cost nothing
    if (!arenas_.back()) {
      throw Error(ErrorKind::backend, str("memory: cannot allocate ", size, " bytes for rank ", rank));
    }
    prefer_large_pages(arenas_.back().get(), size);
    const auto address = reinterpret_cast<std::uintptr_t>(arenas_.back().get());
    next.push_back(arenas_.back().get() + (alignment - address % alignment) % alignment);
  }
  places_.reserve(graph.num_buffers());
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& spec = graph.spec(Buffer{i});
    std::byte*& place      = next[static_cast<std::size_t>(index(spec.rank))];
    places_.push_back({place, bytes_needed(spec)});
    place += aligned(bytes_needed(spec));
  }
}

std::span<std::byte> Memory::bytes(Buffer buffer) const {
  if (buffer.id >= places_.size()) {
    throw Error(ErrorKind::config,
                str("memory: buffer #", buffer.id, " is not of this graph (", places_.size(), " buffers)"));
  }
  return {places_[buffer.id].data, static_cast<std::size_t>(places_[buffer.id].size_bytes)};
}

std::int64_t Memory::size_bytes(Rank rank) const { return arena_sizes_.at(static_cast<std::size_t>(index(rank))); }

void Memory::check_fits(const Graph& graph) const {
  if (graph.num_buffers() != places_.size()) {
    throw Error(ErrorKind::config, str("memory: made for ", places_.size(), " buffers, but the graph has ",
                                       graph.num_buffers(), " (the same buffers in the same order)"));
  }
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const std::int64_t wanted = bytes_needed(graph.spec(Buffer{i}));
    if (wanted != places_[i].size_bytes) {
      throw Error(ErrorKind::config, str("memory: ", graph.describe(Buffer{i}), " has ", wanted, " bytes, but ",
                                         places_[i].size_bytes, " were set aside for buffer #", i));
    }
  }
}

}  // namespace stepgraph
