#include "graphs/step/offload/pass/slots.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "engine/base/error.hpp"
#include "engine/run/storage.hpp"

namespace stepgraph::offload {
namespace {

constexpr std::int64_t alignment = 256;  // of the buffers in a slot

std::int64_t take(std::int64_t& size, std::int64_t bytes, std::int64_t to) {
  const std::int64_t at = rounded_up(size, to);
  size                  = at + bytes;
  return at;
}

// Places the buffers of a use in its slot. Returns their bytes together.
std::int64_t lay_out(const HomeTable& table, Use& use) {
  std::int64_t size = 0;
  for (UsedBuffer& buffer : use.buffers) {
    if (buffer.during == During::home) continue;
    const KnownHome& home     = table.homes[buffer.home];
    const bool moves          = !buffer.fill.empty() || !buffer.back.empty();
    const bool reads_disk     = use.on_host && home.space == Space::disk;  // without the ring
    const std::int64_t stored = stored_bytes(home);
    const bool raw            = home.compression == Compression::none;
    if (buffer.during == During::slot) {
      if (table.unit_of(home).staged) {  // only the bytes that are used
        const ByteInterval hull = buffer.accessed.hull();
        const std::int64_t from = hull.begin / alignment * alignment;
        buffer.offset           = take(size, hull.end - from, alignment) - from;
      } else {
        const bool blocks = reads_disk && raw;
        buffer.offset     = take(size, blocks ? stored : home.bytes, blocks ? Storage::block_bytes : alignment);
      }
    }
    // The host compresses homes in host memory where they are, and lossless kinds in the ring.
    if (!moves || raw || home.compression == Compression::lossless) continue;
    if (!use.on_host || reads_disk) buffer.packed = take(size, stored, reads_disk ? Storage::block_bytes : alignment);
  }
  return size;
}

struct Pool {
  struct Shared {
    std::uint32_t number = 0;  // into the list of all slots
    std::uint32_t last   = 0;  // of its last tenant
  };
  std::vector<Shared> slots;
  std::int64_t usual_bytes = 0;  // the median of its tenants
};

using PoolKey = std::tuple<Rank, OffloadClass, bool>;

struct Assignment {
  Graph& out;
  const HomeTable& table;
  bool shares_staging                     = false;
  std::vector<std::int64_t> sizes         = {};  // by slot
  std::vector<PoolKey> keys               = {};
  std::vector<std::optional<DType>> types = {};  // of all tenants, where it is one
  std::vector<std::string> names          = {};

  std::uint32_t add(const PoolKey& key, std::string name) {
    sizes.emplace_back();
    keys.push_back(key);
    types.emplace_back();
    names.push_back(std::move(name));
    return static_cast<std::uint32_t>(sizes.size() - 1);
  }

  void put(Use& use, std::uint32_t slot, std::int64_t size) {
    use.slot    = slot;
    sizes[slot] = std::max(sizes[slot], size);
    for (const UsedBuffer& buffer : use.buffers) {
      if (buffer.during == During::home) continue;
      const DType type = buffer.packed >= 0 ? DType::u8 : table.homes[buffer.home].type;
      if (!types[slot]) types[slot] = type;
      if (*types[slot] != type) types[slot] = DType::u8;
    }
  }

  std::vector<Buffer> make() {
    std::vector<Buffer> made;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const auto& [rank, of, on_host] = keys[i];
      const DType type                = types[i].value_or(DType::u8);
      made.push_back(out.buffer({.name       = names[i],
                                 .rank       = rank,
                                 .size_bytes = rounded_up(sizes[i], static_cast<std::int64_t>(size_bytes(type))),
                                 .type       = type,
                                 .space      = on_host ? Space::pinned : Space::device,
                                 .lifetime   = on_host && !shares_staging ? Lifetime::persistent : Lifetime::step}));
    }
    return made;
  }
};

// The slot whose last tenant ended first; large tenants take the first free slot instead, so that not all slots become
// large.
Pool::Shared* free_slot(Pool& pool, const Use& use, std::int64_t bytes) {
  Pool::Shared* found = nullptr;
  for (Pool::Shared& slot : pool.slots) {
    if (slot.last >= use.first) continue;
    if (found == nullptr || slot.last < found->last) found = &slot;
    if (bytes > 2 * pool.usual_bytes) return found;
  }
  return found;
}

}  // namespace

std::vector<Buffer> assign_slots(Graph& out, const HomeTable& table, std::vector<Use>& uses, const HomePlan& plan) {
  Assignment assignment{out, table, plan.shares_staging};
  std::map<PoolKey, Pool> pools;
  std::map<PoolKey, std::vector<std::int64_t>> sizes_of;
  std::vector<std::int64_t> sizes;
  const auto key_of = [&](const Use& use) {
    const Unit& unit = table.units[use.unit];
    return PoolKey{unit.rank, unit.of, use.on_host};
  };
  for (Use& use : uses) {
    sizes.push_back(lay_out(table, use));
    if (!table.units[use.unit].staged && use.needs_slot()) sizes_of[key_of(use)].push_back(sizes.back());
  }
  for (auto& [key, all] : sizes_of) {
    std::sort(all.begin(), all.end());
    pools[key].usual_bytes = all[all.size() / 2];
  }
  for (std::size_t i = 0; i < uses.size(); ++i) {
    Use& use          = uses[i];
    const PoolKey key = key_of(use);
    if (sizes[i] == 0) continue;
    const auto& [rank, of, on_host] = key;
    if (table.units[use.unit].staged || !use.needs_slot()) {
      assignment.put(use, assignment.add(key, str(table.units[use.unit].name, on_host ? " on the host" : " staged")),
                     sizes[i]);
      continue;
    }
    Pool& pool         = pools[key];
    const bool more    = static_cast<int>(pool.slots.size()) < plan.slots;
    Pool::Shared* slot = free_slot(pool, use, sizes[i]);
    const bool large   = sizes[i] > 2 * pool.usual_bytes;
    if (slot == nullptr || (more && !large)) {
      const std::uint32_t number =
          assignment.add(key, str(to_string(of), on_host ? " host slot " : " slot ", pool.slots.size()));
      pool.slots.push_back({.number = number});
      slot = &pool.slots.back();
    }
    slot->last = use.last;
    assignment.put(use, slot->number, sizes[i]);
  }
  return assignment.make();
}

std::vector<std::uint32_t> fill_places(const HomeTable& table, const std::vector<Use>& uses, int depth) {
  // Places from 1 on; 0 is the beginning.
  const auto after = [](std::uint32_t place) { return place == none ? 0 : place + 1; };
  std::map<std::uint32_t, std::uint32_t> free_after;         // by slot
  std::map<std::pair<Rank, bool>, std::uint32_t> last_fill;  // by rank, and whether the uses are on the host
  struct StagedLayer {
    std::pair<int, int> of;  // stage and layer
    std::uint32_t last;
  };
  std::map<Rank, std::vector<StagedLayer>> staged;
  std::vector<std::uint32_t> places;
  for (const Use& use : uses) {
    std::uint32_t place = after(use.after);
    // Copies for the host come some layers before their use, but not all of them at the beginning: write-backs share
    // their lane.
    if (table.units[use.unit].staged) {
      std::vector<StagedLayer>& layers = staged[table.units[use.unit].rank];
      const std::pair layer(use.labels.stage, use.labels.layer);
      if (layers.empty() || layers.back().of != layer) layers.push_back({layer, use.last});
      layers.back().last = std::max(layers.back().last, use.last);
      const auto ahead   = static_cast<std::size_t>(depth) + 1;
      if (layers.size() > ahead) {
        const std::uint32_t last = layers[layers.size() - 1 - ahead].last;
        if (last < use.first) place = std::max(place, after(last));
      }
    }
    if (use.slot != none) {
      if (const auto found = free_after.find(use.slot); found != free_after.end())
        place = std::max(place, after(found->second));
      free_after[use.slot] = use.last;
    }
    const bool fills = std::any_of(use.buffers.begin(), use.buffers.end(),
                                   [](const UsedBuffer& buffer) { return !buffer.fill.empty(); });
    if (fills) {
      place               = std::max(place, after(use.not_before));
      std::uint32_t& last = last_fill[{table.units[use.unit].rank, use.on_host}];
      last = place = std::max(place, last);
    }
    places.push_back(place == 0 ? none : place - 1);
  }
  return places;
}

}  // namespace stepgraph::offload
