#include "engine/run/memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "engine/base/size.hpp"
#include "engine/base/text.hpp"
#include "engine/run/device.hpp"
#include "engine/run/host_memory_error.hpp"

namespace stepgraph {

static_assert(MemoryPlan::block_alignment == Storage::block_bytes);

namespace {

// A pattern that real data is unlikely to contain for more than a few bytes.
std::byte pattern(std::int64_t at) {
  const auto mixed = static_cast<std::uint64_t>(at + 1) * 0x9e3779b97f4a7c15u;
  return static_cast<std::byte>(mixed >> 56 | 1);
}

// Sequential access to large memory is 1.5 times as fast with large pages. This is only a hint to the kernel.
void prefer_large_pages(void* pages, std::size_t size) {
  constexpr std::size_t large = std::size_t{2} << 20;
  if (size >= 2 * large) (void)madvise(pages, size, MADV_HUGEPAGE);
}

// "; this machine has 25234698240 (23.5 GiB)"; empty: not known.
std::string memory_of_machine() {
  const std::int64_t pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
  return pages > 0 && page_bytes > 0 ? str("; this machine has ", limit_and_text(pages * page_bytes)) : std::string();
}

}  // namespace

void Memory::Free::operator()(std::byte* block) const noexcept {
  if (device != nullptr) {
    device->release(rank, space, block);
  } else if (mapped > 0) {
    munmap(block, mapped);
  } else {
    std::free(block);
  }
}

// Zeroed. Large blocks are mapped: pages that are never used cost nothing, and all of them are returned.
Memory::Block Memory::allocate(std::size_t size) {
  constexpr std::size_t large = 1 << 20;
  if (size < large) return Block(static_cast<std::byte*>(std::calloc(size, 1)), Free{0});
  void* const pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return Block(nullptr, Free{0});
  prefer_large_pages(pages, size);
  return Block(static_cast<std::byte*>(pages), Free{size});
}

Memory::Arena Memory::make_arena(const ArenaPlan& plan) const {
  Arena arena{plan.rank, plan.space, plan.size_bytes, plan.persistent_bytes};
  if (plan.space == Space::disk) {
    if (plan.size_bytes == 0) return arena;
    if (!make_) {
      throw Error(ErrorKind::config,
                  str("memory: rank ", plan.rank, " has ", plan.size_bytes,
                      " bytes of buffers on disk, and nothing makes their storage (pass a MakeStorage, as "
                      "RunOptions::storage; spill_files makes one)"));
    }
    arena.own_storage = make_(plan.rank, plan.size_bytes);
    arena.stored      = {arena.own_storage.get(), 0, plan.size_bytes};
    return arena;
  }
  const std::int64_t alignment = MemoryPlan::alignment_of(plan.space);
  const auto size              = static_cast<std::size_t>(plan.size_bytes + alignment);
  const Free on_device{0, device_, plan.rank, plan.space};
  arena.block = device_ != nullptr ? Block(device_->allocate(plan.rank, plan.space, size), on_device) : allocate(size);
  if (!arena.block)
    throw HostMemoryError(str("memory: cannot allocate ", bytes_and_text(static_cast<std::int64_t>(size)),
                              " of host memory for rank ", plan.rank, memory_of_machine()));
  const auto address = reinterpret_cast<std::intptr_t>(arena.block.get());
  arena.begin        = arena.block.get() + (MemoryPlan::round_up(address, alignment) - address);
  return arena;
}

// Arenas are in the order of rank and space.
const Memory::Arena* Memory::find(Rank rank, Space space) const {
  const auto at =
      std::lower_bound(arenas_.begin(), arenas_.end(), std::pair(rank, space),
                       [](const Arena& arena, const auto& key) { return std::pair(arena.rank, arena.space) < key; });
  return at != arenas_.end() && at->rank == rank && at->space == space ? &*at : nullptr;
}

std::string Memory::describe(Buffer buffer) const {
  return str(graph_.describe(buffer), " of rank ", graph_.spec(buffer).rank);
}

const Memory::Place& Memory::require(Buffer buffer, std::int64_t offset, std::size_t size) const {
  if (buffer.id >= places_.size()) {
    throw Error(ErrorKind::config,
                str("memory: buffer #", buffer.id, " is not in this graph (it has ", places_.size(), " buffers)"));
  }
  const Place& place = places_[buffer.id];
  if (place.shared) {
    throw Error(ErrorKind::config, str("memory: ", describe(buffer),
                                       " shares its bytes with other buffers in this plan, so its content is "
                                       "undefined outside a run (declare it persistent)"));
  }
  if (offset < 0 || offset + static_cast<std::int64_t>(size) > place.size_bytes) {
    throw Error(ErrorKind::config, str("memory: bytes ", offset, " to ", offset + static_cast<std::int64_t>(size),
                                       " of ", describe(buffer), ", which has ", place.size_bytes, " bytes"));
  }
  return place;
}

std::span<std::byte> Memory::bytes(Buffer buffer) const {
  const Place& place = require(buffer, 0, 0);
  if (place.space == Space::disk)
    throw Error(ErrorKind::config, str("memory: ", describe(buffer), " is on disk (read() and write() copy)"));
  if (device_ != nullptr && !device_->host_sees(place.space))
    throw Error(ErrorKind::config, str("memory: ", describe(buffer), " is on a device (read() and write() copy)"));
  return {place.data, static_cast<std::size_t>(place.size_bytes)};
}

StoredBytes Memory::stored(Buffer buffer) const { return places_[buffer.id].stored; }

void Memory::read_bytes(Buffer buffer, std::int64_t offset, std::span<std::byte> to) const {
  const Place& place = require(buffer, offset, to.size());
  if (to.empty()) return;
  if (place.stored.storage != nullptr) {
    place.stored.storage->read(place.stored.offset + offset, to);
  } else if (device_ != nullptr) {
    device_->read(place.data + offset, to);
  } else {
    std::memcpy(to.data(), place.data + offset, to.size());
  }
}

void Memory::write_bytes(Buffer buffer, std::int64_t offset, std::span<const std::byte> from) const {
  const Place& place = require(buffer, offset, from.size());
  if (from.empty()) return;
  if (place.stored.storage != nullptr) {
    place.stored.storage->write(place.stored.offset + offset, from);
  } else if (device_ != nullptr) {
    device_->write(place.data + offset, from);
  } else {
    std::memcpy(place.data + offset, from.data(), from.size());
  }
}

std::span<std::byte> Memory::arena(Rank rank, Space space) const {
  if (space == Space::disk)
    throw Error(ErrorKind::config, str("memory: the arena of rank ", rank, " on disk has no addresses"));
  const Arena* const arena = find(rank, space);
  if (!arena) return {};
  return {arena->begin, static_cast<std::size_t>(arena->size_bytes)};
}

std::int64_t Memory::size_bytes(Rank rank) const {
  std::int64_t total = 0;
  for (const Arena& arena : arenas_) total += arena.rank == rank ? arena.size_bytes : 0;
  return total;
}

void Memory::read_arena(const Arena& arena, std::int64_t offset, std::span<std::byte> to) const {
  if (to.empty()) return;
  if (arena.stored.storage != nullptr) {
    arena.stored.storage->read(arena.stored.offset + offset, to);
  } else if (device_ != nullptr) {
    device_->read(arena.begin + offset, to);
  } else {
    std::memcpy(to.data(), arena.begin + offset, to.size());
  }
}

void Memory::write_arena(const Arena& arena, std::int64_t offset, std::span<const std::byte> from) const {
  if (from.empty()) return;
  if (arena.stored.storage != nullptr) {
    arena.stored.storage->write(arena.stored.offset + offset, from);
  } else if (device_ != nullptr) {
    device_->write(arena.begin + offset, from);
  } else {
    std::memcpy(arena.begin + offset, from.data(), from.size());
  }
}

void Memory::poison() {
  for (const Arena& arena : arenas_) {
    const std::int64_t first = arena.persistent_bytes;
    std::vector<std::byte> bytes(static_cast<std::size_t>(arena.size_bytes - first));
    for (std::int64_t i = 0; i < std::ssize(bytes); ++i) bytes[static_cast<std::size_t>(i)] = pattern(first + i);
    write_arena(arena, first, bytes);
  }
}

std::int64_t Memory::used_bytes(Rank rank, Space space) const {
  const Arena* const arena = find(rank, space);
  if (!arena) return 0;
  const std::int64_t first = arena->persistent_bytes;
  std::vector<std::byte> bytes(static_cast<std::size_t>(arena->size_bytes - first));
  read_arena(*arena, first, bytes);
  std::int64_t end = arena->size_bytes;
  while (end > first && bytes[static_cast<std::size_t>(end - 1 - first)] == pattern(end - 1)) --end;
  return end;
}

void Memory::check_fits(const Graph& graph, const MemoryPlan* plan) const {
  if (graph.num_buffers() != places_.size()) {
    throw Error(ErrorKind::config, str("memory: made for ", places_.size(), " buffers, but the graph has ",
                                       graph.num_buffers(), " (the same buffers in the same order)"));
  }
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& buffer  = graph.spec(Buffer{i});
    const Place& place        = places_[i];
    const std::int64_t wanted = buffer.token || place.offset == MemoryPlan::nowhere ? 0 : buffer.size_bytes;
    if (wanted != place.size_bytes) {
      throw Error(ErrorKind::config, str("memory: ", graph.describe(Buffer{i}), " has ", wanted, " bytes, but ",
                                         place.size_bytes, " bytes were allocated for buffer #", i));
    }
    if (wanted > 0 && (buffer.rank != place.rank || buffer.space != place.space)) {
      throw Error(ErrorKind::config,
                  str("memory: ", graph.describe(Buffer{i}), " is of rank ", buffer.rank, " in ",
                      to_string(buffer.space), " memory, but buffer #", i, " was allocated elsewhere"));
    }
    if (plan && plan->offsets[i] != place.offset) {
      throw Error(ErrorKind::config,
                  str("memory: the plan puts ", graph.describe(Buffer{i}), " at ", plan->offsets[i],
                      ", this memory has it at ", place.offset, " (make the memory from the plan that runs)"));
    }
    if (!plan && (place.shared || (place.offset == MemoryPlan::nowhere && !buffer.token))) {
      throw Error(ErrorKind::config,
                  str("memory: ", graph.describe(Buffer{i}),
                      " has no separate bytes in this memory, which was made from a plan (give the program the same "
                      "plan: its reuse edges order buffers that share bytes)"));
    }
  }
}

}  // namespace stepgraph
