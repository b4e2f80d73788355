#include "engine/run/memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "engine/run/device.hpp"

namespace stepgraph {
namespace {

std::int64_t aligned(std::int64_t size) {
  return (size + MemoryPlan::alignment - 1) / MemoryPlan::alignment * MemoryPlan::alignment;
}

// Offsets and arenas without shared bytes: persistent buffers first, as in a plan.
MemoryPlan apart(const Graph& graph) {
  MemoryPlan plan;
  plan.offsets.assign(graph.num_buffers(), MemoryPlan::nowhere);
  std::map<std::pair<Rank, Space>, ArenaPlan> arenas;
  for (const Lifetime lifetime : {Lifetime::persistent, Lifetime::step}) {
    for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
      const BufferSpec& buffer = graph.spec(Buffer{i});
      if (buffer.token || buffer.lifetime != lifetime) continue;
      ArenaPlan& arena =
          arenas.try_emplace({buffer.rank, buffer.space}, ArenaPlan{.rank = buffer.rank, .space = buffer.space})
              .first->second;
      plan.offsets[i] = std::exchange(arena.size_bytes, arena.size_bytes + aligned(buffer.size_bytes));
      if (lifetime == Lifetime::persistent) arena.persistent_bytes = arena.size_bytes;
    }
  }
  for (const auto& [where, arena] : arenas) plan.arenas.push_back(arena);
  return plan;
}

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

Memory::Memory(const Graph& graph, DeviceMemory* device) : Memory(graph, apart(graph), device) {}

Memory::Memory(const Graph& graph, const MemoryPlan& plan, DeviceMemory* device) : graph_(graph), device_(device) {
  if (plan.offsets.size() != graph.num_buffers()) {
    throw Error(ErrorKind::config, str("memory: the plan is for ", plan.offsets.size(), " buffers, the graph has ",
                                       graph.num_buffers(), " (plan the graph that runs)"));
  }
  if (!std::is_sorted(plan.arenas.begin(), plan.arenas.end(), [](const ArenaPlan& a, const ArenaPlan& b) {
        return std::pair(a.rank, a.space) < std::pair(b.rank, b.space);
      })) {
    throw Error(ErrorKind::config, "memory: the plan's arenas are not sorted by rank and space");
  }
  for (const ArenaPlan& arena : plan.arenas) {
    if (arena.space == Space::disk && arena.size_bytes > 0) {
      throw Error(ErrorKind::config,
                  str("memory: rank ", arena.rank,
                      " has buffers on disk, which this memory cannot hold (use space device or pinned)"));
    }
    const auto size = static_cast<std::size_t>(arena.size_bytes + MemoryPlan::alignment);
    Block block     = device_ != nullptr ? Block(device_->allocate(arena.rank, arena.space, size),
                                                 Free{0, device_, arena.rank, arena.space})
                                         : allocate(size);
    if (!block) throw Error(ErrorKind::backend, str("memory: cannot allocate ", size, " bytes for rank ", arena.rank));
    const auto address     = reinterpret_cast<std::intptr_t>(block.get());
    std::byte* const begin = block.get() + (aligned(address) - address);
    arenas_.push_back({arena.rank, arena.space, arena.size_bytes, arena.persistent_bytes, std::move(block), begin});
  }
  // A buffer shares bytes if it begins before one below it ends, or if the next one begins before it ends.
  std::vector<std::uint32_t> order;
  places_.reserve(graph.num_buffers());
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& buffer  = graph.spec(Buffer{i});
    const std::int64_t offset = plan.offsets[i];
    places_.push_back(
        {nullptr, offset, buffer.token || offset == MemoryPlan::nowhere ? 0 : buffer.size_bytes, false, false});
    if (buffer.token || offset == MemoryPlan::nowhere) continue;
    const Arena* const arena = find(buffer.rank, buffer.space);
    if (!arena || offset < 0 || offset + buffer.size_bytes > arena->size_bytes) {
      throw Error(ErrorKind::config, str("memory: the plan puts ", graph.describe(Buffer{i}), " of rank ", buffer.rank,
                                         " at ", offset, ", outside its arena"));
    }
    places_[i].data = arena->begin + offset;
    if (buffer.size_bytes > 0) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return places_[a].data < places_[b].data; });
  const std::byte* end = nullptr;
  for (std::size_t i = 0; i < order.size(); ++i) {
    Place& place                  = places_[order[i]];
    const std::byte* const behind = place.data + place.size_bytes;
    place.shared                  = place.data < end || (i + 1 < order.size() && places_[order[i + 1]].data < behind);
    end                           = std::max(end, behind);
  }
}

Memory::Memory(const Graph& graph, const MemoryPlan& plan, std::span<const Loan> loans, DeviceMemory* device)
    : Memory(graph, plan, device) {
  borrow(loans);
}

void Memory::borrow(std::span<const Loan> loans) {
  std::map<const std::byte*, Buffer> ends;  // of the loans so far
  for (const Loan& loan : loans) {
    const auto refuse = [&](const std::string& why) {
      throw Error(ErrorKind::config, str("memory: ", describe(loan.buffer), why));
    };
    if (loan.buffer.id >= places_.size()) {
      throw Error(ErrorKind::config, str("memory: bytes are lent to buffer #", loan.buffer.id,
                                         ", which is not in this graph (it has ", places_.size(), " buffers)"));
    }
    Place& place = places_[loan.buffer.id];
    if (graph_.spec(loan.buffer).lifetime != Lifetime::persistent)
      refuse(" is lent bytes, but is not persistent (declare it persistent)");
    if (static_cast<std::int64_t>(loan.bytes.size()) != place.size_bytes) {
      refuse(str(" has ", place.size_bytes, " bytes, but is lent ", loan.bytes.size()));
    }
    if (place.size_bytes == 0) continue;
    const std::byte* const begin = loan.bytes.data();
    const std::byte* const end   = begin + loan.bytes.size();
    const auto next              = ends.upper_bound(begin);
    if (next != ends.end() && next->first - places_[next->second.id].size_bytes < end) {
      refuse(
          str(" is lent bytes that are also lent to ", describe(next->second), ", and no edge orders their accesses"));
    }
    ends.emplace(end, loan.buffer);
    place.data = loan.bytes.data();
    place.lent = true;
  }
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

std::byte* Memory::within(Buffer buffer, std::int64_t offset, std::size_t size) const {
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
  return place.data + offset;
}

std::span<std::byte> Memory::bytes(Buffer buffer) const {
  std::byte* const data = within(buffer, 0, 0);
  if (device_ != nullptr && !device_->host_sees(graph_.spec(buffer).space)) {
    throw Error(ErrorKind::config, str("memory: ", describe(buffer), " is on a device (read() and write() copy)"));
  }
  return {data, static_cast<std::size_t>(places_[buffer.id].size_bytes)};
}

std::span<std::byte> Memory::loan(Buffer buffer) const {
  return {within(buffer, 0, 0), static_cast<std::size_t>(places_[buffer.id].size_bytes)};
}

void Memory::read_bytes(Buffer buffer, std::int64_t offset, std::span<std::byte> to) const {
  const std::byte* const from = within(buffer, offset, to.size());
  if (to.empty()) return;
  if (device_ != nullptr) {
    device_->read(from, to);
  } else {
    std::memcpy(to.data(), from, to.size());
  }
}

void Memory::write_bytes(Buffer buffer, std::int64_t offset, std::span<const std::byte> from) const {
  std::byte* const to = within(buffer, offset, from.size());
  if (from.empty()) return;
  if (device_ != nullptr) {
    device_->write(to, from);
  } else {
    std::memcpy(to, from.data(), from.size());
  }
}

std::span<std::byte> Memory::arena(Rank rank, Space space) const {
  const Arena* const arena = find(rank, space);
  if (!arena) return {};
  return {arena->begin, static_cast<std::size_t>(arena->size_bytes)};
}

std::int64_t Memory::size_bytes(Rank rank) const {
  std::int64_t total = 0;
  for (const Arena& arena : arenas_) total += arena.rank == rank ? arena.size_bytes : 0;
  return total;
}

void Memory::poison() {
  for (const Arena& arena : arenas_) {
    const std::int64_t first = arena.persistent_bytes, size = arena.size_bytes - first;
    std::vector<std::byte> there(device_ != nullptr ? static_cast<std::size_t>(size) : 0);
    std::byte* const bytes = device_ != nullptr ? there.data() : arena.begin + first;
    for (std::int64_t i = 0; i < size; ++i) bytes[i] = pattern(first + i);
    if (!there.empty()) device_->write(arena.begin + first, there);
  }
}

std::int64_t Memory::used_bytes(Rank rank, Space space) const {
  const Arena* const arena = find(rank, space);
  if (!arena) return 0;
  const std::int64_t first = arena->persistent_bytes;
  std::vector<std::byte> copy;
  const std::byte* bytes = arena->begin + first;
  if (device_ != nullptr) {
    copy.resize(static_cast<std::size_t>(arena->size_bytes - first));
    if (!copy.empty()) device_->read(bytes, copy);
    bytes = copy.data();
  }
  std::int64_t end = arena->size_bytes;
  while (end > first && bytes[end - 1 - first] == pattern(end - 1)) --end;
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
    const Arena* const arena = wanted > 0 ? find(buffer.rank, buffer.space) : nullptr;
    if (wanted > 0 && (!arena || (!place.lent && arena->begin + place.offset != place.data))) {
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
