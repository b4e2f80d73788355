// How a Memory gives buffers their places: arenas of its own, and bytes of another Memory.
#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "engine/run/device.hpp"
#include "engine/run/memory.hpp"
#include "engine/run/threads/first_touch.hpp"

namespace stepgraph {
namespace {

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
      plan.offsets[i]  = MemoryPlan::round_up(arena.size_bytes, MemoryPlan::alignment_of(buffer));
      arena.size_bytes = plan.offsets[i] + MemoryPlan::room_of(buffer);
      if (lifetime == Lifetime::persistent) arena.persistent_bytes = arena.size_bytes;
    }
  }
  for (const auto& [where, arena] : arenas) plan.arenas.push_back(arena);
  return plan;
}

// The bytes of a plan's arenas that are not needed, because their buffers are lent the bytes of another memory.
class LentBytes {
 public:
  LentBytes(const Graph& graph, const MemoryPlan& plan, std::span<const Loan> loans) : plan_(plan) {
    for (const Loan& loan : loans) {
      const BufferSpec& buffer = graph.spec(loan.buffer);
      if (buffer.size_bytes > 0)
        sums_[{buffer.rank, buffer.space}][plan.offsets[loan.buffer.id]] = MemoryPlan::room_of(buffer);
    }
    for (auto& [where, sizes] : sums_) {
      std::int64_t sum = 0;
      for (auto& [offset, size] : sizes) size = sum += size;
    }
  }

  // By how much a place moves down. Step buffers move together and keep their alignment.
  [[nodiscard]] std::int64_t before(Rank rank, Space space, std::int64_t offset) const {
    const auto of = sums_.find({rank, space});
    if (of == sums_.end()) return 0;
    if (offset >= plan_.arena(rank, space).persistent_bytes) {
      const std::int64_t step = MemoryPlan::alignment_of(space);
      return of->second.rbegin()->second / step * step;
    }
    const auto next = of->second.lower_bound(offset);
    return next == of->second.begin() ? 0 : std::prev(next)->second;
  }

 private:
  const MemoryPlan& plan_;
  std::map<std::pair<Rank, Space>, std::map<std::int64_t, std::int64_t>> sums_;  // by arena, by planned offset
};

}  // namespace

Memory::Memory(const Graph& graph, DeviceMemory* device, const MakeStorage& make)
    : Memory(graph, apart(graph), {}, device, make, nullptr) {}

Memory::Memory(const Graph& graph, const MemoryPlan& plan, DeviceMemory* device, const MakeStorage& make)
    : Memory(graph, plan, {}, device, make, nullptr) {}

Memory::Memory(const Graph& graph, const MemoryPlan& plan, std::span<const Loan> loans, DeviceMemory* device,
               const MakeStorage& make)
    : Memory(graph, plan, loans, device, make, nullptr) {}

Memory::Memory(const Graph& graph, const MemoryPlan& plan, const Memory& owner)
    : Memory(graph, plan, owner.lend_all(graph), owner.device_, owner.make_, &owner) {}

// Places of lent buffers take no bytes: what lies behind them in the arena moves down.
Memory::Memory(const Graph& graph, const MemoryPlan& plan, std::span<const Loan> loans, DeviceMemory* device,
               const MakeStorage& make, const Memory* owner)
    : graph_(graph), device_(device), make_(make) {
  check(plan);
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& buffer = graph.spec(Buffer{i});
    const bool nowhere       = buffer.token || plan.offsets[i] == MemoryPlan::nowhere;
    places_.push_back({.offset     = plan.offsets[i],
                       .size_bytes = nowhere ? 0 : buffer.size_bytes,
                       .rank       = buffer.rank,
                       .space      = buffer.space});
  }
  borrow(loans);
  const LentBytes lent(graph, plan, loans);
  for (const ArenaPlan& arena : plan.arenas) {
    const std::int64_t gone = lent.before(arena.rank, arena.space, arena.persistent_bytes);
    ArenaPlan own           = arena;
    own.persistent_bytes -= gone;
    own.size_bytes -= gone;
    std::optional<Arena> borrowed = owner != nullptr ? owner->borrow_arena(own) : std::nullopt;
    arenas_.push_back(borrowed ? std::move(*borrowed) : make_arena(own));
  }
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    Place& place = places_[i];
    if (place.lent || graph.spec(Buffer{i}).token || place.offset == MemoryPlan::nowhere) continue;
    const Arena& arena        = *find(place.rank, place.space);
    const std::int64_t offset = place.offset - lent.before(place.rank, place.space, place.offset);
    if (arena.stored.storage != nullptr) {
      place.stored = {arena.stored.storage, arena.stored.offset + offset, place.size_bytes};
    } else {
      place.data = arena.begin + offset;
    }
  }
  find_shared();
  const std::vector<NumaNode> nodes = chosen_numa_nodes();
  if (nodes.empty() || device_ != nullptr) return;
  std::map<std::pair<Rank, Space>, FreshArena> fresh;  // without small ones, and without those of the owner
  for (const Arena& arena : arenas_) {
    if (arena.block && arena.block.get_deleter().mapped > 0)
      fresh[{arena.rank, arena.space}] = {arena.rank, arena.begin, static_cast<std::size_t>(arena.size_bytes), {}};
  }
  for (const Place& place : places_) {
    const auto at = fresh.find({place.rank, place.space});
    if (at == fresh.end() || place.lent || place.data == nullptr || place.size_bytes == 0) continue;
    at->second.buffers.push_back(
        {static_cast<std::size_t>(place.data - at->second.begin), static_cast<std::size_t>(place.size_bytes)});
  }
  for (const auto& [where, arena] : fresh) place_pages(arena, graph.ranks(), nodes);
}

// The plan is of the graph, and its places are inside its arenas.
void Memory::check(const MemoryPlan& plan) const {
  if (plan.offsets.size() != graph_.num_buffers()) {
    throw Error(ErrorKind::config, str("memory: the plan is for ", plan.offsets.size(), " buffers, the graph has ",
                                       graph_.num_buffers(), " (plan the graph that runs)"));
  }
  if (!std::is_sorted(plan.arenas.begin(), plan.arenas.end(), [](const ArenaPlan& a, const ArenaPlan& b) {
        return std::pair(a.rank, a.space) < std::pair(b.rank, b.space);
      })) {
    throw Error(ErrorKind::config, "memory: the plan's arenas are not sorted by rank and space");
  }
  for (std::uint32_t i = 0; i < graph_.num_buffers(); ++i) {
    const BufferSpec& buffer  = graph_.spec(Buffer{i});
    const std::int64_t offset = plan.offsets[i];
    if (buffer.token || offset == MemoryPlan::nowhere) continue;
    if (offset < 0 || offset + buffer.size_bytes > plan.arena(buffer.rank, buffer.space).size_bytes) {
      throw Error(ErrorKind::config,
                  str("memory: the plan puts ", describe(Buffer{i}), " at ", offset, ", outside its arena"));
    }
  }
}

Loan Memory::loan(Buffer buffer, Buffer to) const {
  const Place& place = require(buffer, 0, 0);
  if (place.space == Space::disk) return {.buffer = to, .stored = place.stored};
  return {.buffer = to, .bytes = {place.data, static_cast<std::size_t>(place.size_bytes)}};
}

// All persistent buffers, which another graph has too.
std::vector<Loan> Memory::lend_all(const Graph& to) const {
  std::vector<Loan> loans;
  for (std::uint32_t i = 0; i < to.num_buffers(); ++i) {
    const BufferSpec& buffer = to.spec(Buffer{i});
    if (buffer.token || buffer.lifetime != Lifetime::persistent) continue;
    if (i >= places_.size() || graph_.spec(Buffer{i}) != buffer)
      throw Error(ErrorKind::config,
                  str("memory: ", to.describe(Buffer{i}), " is not buffer #", i, " of the owner (the same buffers)"));
    loans.push_back(loan(Buffer{i}, Buffer{i}));
  }
  return loans;
}

// Lends the bytes of step buffers to step buffers of another graph. None: the other graph needs more of them.
std::optional<Memory::Arena> Memory::borrow_arena(const ArenaPlan& plan) const {
  const Arena* const own = find(plan.rank, plan.space);
  if (own == nullptr) return std::nullopt;
  const std::int64_t begin = MemoryPlan::round_up(own->persistent_bytes, MemoryPlan::alignment_of(plan.space));
  if (begin + plan.size_bytes > own->size_bytes) return std::nullopt;
  Arena arena{plan.rank, plan.space, plan.size_bytes, plan.persistent_bytes};
  arena.begin  = own->begin == nullptr ? nullptr : own->begin + begin;
  arena.stored = {own->stored.storage, own->stored.offset + begin, plan.size_bytes};
  return arena;
}

// A buffer shares bytes if it begins before one below it ends, or if the next one begins before it ends.
void Memory::find_shared() {
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 0; i < places_.size(); ++i) {
    if (places_[i].size_bytes > 0 && !places_[i].lent) order.push_back(i);
  }
  const auto key = [&](std::uint32_t i) { return std::tuple(places_[i].rank, places_[i].space, places_[i].offset); };
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return key(a) < key(b); });
  std::int64_t end = 0;  // of the buffers below, in the same arena
  for (std::size_t i = 0; i < order.size(); ++i) {
    Place& place          = places_[order[i]];
    const auto same_arena = [&](std::size_t other) {
      return places_[order[other]].rank == place.rank && places_[order[other]].space == place.space;
    };
    if (i == 0 || !same_arena(i - 1)) end = 0;
    const std::int64_t behind = place.offset + place.size_bytes;
    const bool next_inside    = i + 1 < order.size() && same_arena(i + 1) && places_[order[i + 1]].offset < behind;
    place.shared              = place.offset < end || next_inside;
    end                       = std::max(end, behind);
  }
}

void Memory::borrow(std::span<const Loan> loans) {
  // Ends of the loans so far, by storage (null: memory): addresses, or offsets in the storage.
  std::map<std::pair<const Storage*, std::intptr_t>, Buffer> ends;
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
    const bool on_disk      = loan.stored.storage != nullptr;
    const std::int64_t size = on_disk ? loan.stored.size_bytes : std::ssize(loan.bytes);
    if (size != place.size_bytes) refuse(str(" has ", place.size_bytes, " bytes, but is lent ", size));
    if (place.size_bytes == 0) continue;
    if (on_disk != (place.space == Space::disk)) {
      refuse(str(" is in ", to_string(place.space), " memory, but is lent bytes ", on_disk ? "on disk" : "in memory"));
    }
    if (place.lent) refuse(" is lent bytes twice");
    const Storage* const storage = loan.stored.storage;
    const auto begin =
        on_disk ? static_cast<std::intptr_t>(loan.stored.offset) : reinterpret_cast<std::intptr_t>(loan.bytes.data());
    const auto next = ends.upper_bound({storage, begin});
    if (next != ends.end() && next->first.first == storage &&
        next->first.second - places_[next->second.id].size_bytes < begin + size) {
      refuse(
          str(" is lent bytes that are also lent to ", describe(next->second), ", and no edge orders their accesses"));
    }
    ends.emplace(std::pair(storage, begin + size), loan.buffer);
    place.data   = loan.bytes.data();
    place.stored = loan.stored;
    place.lent   = true;
  }
}

}  // namespace stepgraph
