#pragma once
#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "engine/base/error.hpp"
#include "tests/support/enumerators.hpp"
#include "tests/support/graphs/random_graph.hpp"

// Memory accesses of random graphs. Used only by random_graph.cpp.
namespace stepgraph::testing {
// Buffers have at most 64 bytes here, so a set of bytes is a word.
using Bytes = std::uint64_t;

inline Bytes bytes_of(const Region& region) {
  Bytes bytes = 0;
  for (std::int64_t range = 0; range < region.count; ++range) {
    for (std::int64_t k = 0; k < region.length; ++k) bytes |= Bytes{1} << (region.offset + range * region.stride + k);
  }
  return bytes;
}

template <class T, std::size_t n>
T pick(Random& random, const std::array<T, n>& from) {
  return from[random.below(n)];
}

// A node before it is added. Its accesses are known as words, its issue position is not known yet.
struct Planned {
  NodeSpec spec;
  Rank rank{};
  int event = -1;  // parts of one event match, or are issued together
  struct Use {
    std::uint32_t buffer;
    Bytes read, written;
  };
  std::vector<Use> uses = {};
};

inline bool conflict(const Planned& a, const Planned& b) {
  for (const auto& x : a.uses) {
    for (const auto& y : b.uses) {
      if (x.buffer == y.buffer && ((x.written & (y.read | y.written)) | (x.read & y.written)) != 0) return true;
    }
  }
  return false;
}

inline bool same_lane(const Planned& a, const Planned& b) { return a.spec.lane && a.spec.lane == b.spec.lane; }

// The buffers of the ranks, and accesses that a node may have.
class MemoryPlanner {
 protected:
  MemoryPlanner(std::uint64_t seed, const RandomGraphOptions& options)
      : random_(seed), options_(options), graph_(draw_num_ranks()) {}

  struct Memory {
    Buffer buffer;
    std::int64_t size;
    bool needs_writing;  // before it may be read
    bool token;
    bool habitual              = false;  // accessed only as in `habits`; otherwise only sometimes
    std::vector<Region> habits = {};
    Bytes written              = 0;
  };

  // A single rank has no peers, so it is drawn less often.
  int draw_num_ranks() {
    const std::int64_t least = options_.max_ranks > 1 && random_.chance(70) ? 2 : 1;
    return static_cast<int>(random_.between(least, options_.max_ranks));
  }

  [[nodiscard]] int num_ranks() const { return graph_.num_ranks(); }
  [[nodiscard]] Rank any_rank() { return Rank{static_cast<int>(random_.between(0, num_ranks() - 1))}; }
  std::vector<Memory>& memory_of(Rank rank) { return memory_[static_cast<std::size_t>(index(rank))]; }

  void make_buffers() {
    memory_.resize(static_cast<std::size_t>(num_ranks()));
    for (int rank = 0; rank < num_ranks(); ++rank) {
      for (std::int64_t i = random_.between(1, options_.max_buffers_per_rank); i > 0; --i) {
        const std::int64_t size = 8 * random_.between(1, 8);
        const auto lifetime     = random_.chance(50) ? Lifetime::persistent : Lifetime::step;
        const Buffer buffer     = graph_.buffer({.name       = str("b", graph_.num_buffers()),
                                                 .rank       = Rank{rank},
                                                 .size_bytes = size,
                                                 .type       = DType::u8,  // plain bytes: parts of any type may use them
                                                 .lifetime   = lifetime});
        Memory memory{buffer, size, lifetime == Lifetime::step, false};
        give_habits(memory);
        memory_of(Rank{rank}).push_back(std::move(memory));
      }
      if (!random_.chance(40)) continue;
      const Buffer token = graph_.token(Rank{rank}, str("t", graph_.num_buffers()));
      memory_of(Rank{rank}).push_back({token, 1, false, true});
    }
  }

  // Real graphs access a buffer as a whole, or in the same few pieces again and again.
  void give_habits(Memory& memory) {
    memory.habitual = random_.chance(60);
    if (memory.habitual && random_.chance(50)) {
      memory.habits.push_back({.length = memory.size});
      return;
    }
    for (std::int64_t n = random_.between(1, 3); n > 0; --n) {
      const Region region = free_region(memory.size);
      if (region.num_bytes() > 0) memory.habits.push_back(region);
    }
    memory.habitual = memory.habitual && !memory.habits.empty();
  }

  void make_groups() {
    for (std::int64_t i = random_.between(1, 3); i > 0; --i) {
      std::vector<Rank> ranks;
      for (int rank = 0; rank < num_ranks(); ++rank) ranks.push_back(Rank{rank});
      random_.shuffle(ranks);
      // Groups of one are allowed, but test little.
      const std::int64_t least = num_ranks() > 1 && random_.chance(85) ? 2 : 1;
      ranks.resize(static_cast<std::size_t>(random_.between(least, num_ranks())));
      groups_.push_back(graph_.group({.name = str("g", i), .ranks = ranks}));
    }
  }

  Planned blank(std::string name, Rank rank) {
    Planned node{.spec = {.name = std::move(name)}, .rank = rank};
    if (random_.chance(60)) node.spec.lane = graph_.lane(rank, random_.pick(lane_kinds_));
    node.spec.rank = rank;
    return node;
  }

  Region any_region(const Memory& memory) {
    if (!memory.habits.empty() && (memory.habitual || random_.chance(50))) return random_.pick(memory.habits);
    return free_region(memory.size);
  }

  // Some bytes of a buffer: all, a range, or a strided set.
  Region free_region(std::int64_t size) {
    if (size == 1 || random_.chance(25)) return {.length = size};
    if (random_.chance(3)) return {.offset = random_.between(0, size), .length = 0};
    if (random_.chance(50)) {
      const std::int64_t offset = random_.between(0, size - 1);
      return {.offset = offset, .length = random_.between(1, size - offset)};
    }
    const std::int64_t length = random_.between(1, 3), stride = length + random_.between(0, 4);
    const std::int64_t offset = random_.between(0, std::min(size - length, stride));
    const std::int64_t count  = random_.between(1, (size - offset - length) / stride + 1);
    return {.offset = offset, .length = length, .stride = stride, .count = count};
  }

  // A region of exactly `length` bytes, if one fits.
  std::optional<Region> region_of(const Memory& memory, std::int64_t length) {
    if (!memory.habits.empty() && (memory.habitual || random_.chance(50))) {
      const Region& region = random_.pick(memory.habits);
      if (region.num_bytes() == length) return region;
      if (memory.habitual) return std::nullopt;
    }
    const std::int64_t size = memory.size;
    if (length > size) return std::nullopt;
    const std::int64_t count = random_.between(1, 4);
    if (count > 1 && length % count == 0 && random_.chance(60)) {
      const std::int64_t piece = length / count, slack = (size - length) / (count - 1);
      const std::int64_t stride = piece + random_.between(0, slack);
      const std::int64_t offset = random_.between(0, size - stride * (count - 1) - piece);
      return Region{.offset = offset, .length = piece, .stride = stride, .count = count};
    }
    return Region{.offset = random_.between(0, size - length), .length = length};
  }

  static bool allowed(const Memory& memory, AccessMode mode, Bytes bytes) {
    return !reads(mode) || !memory.needs_writing || (bytes & ~memory.written) == 0;
  }

  static void use(Planned& node, const Memory& memory, AccessMode mode, const Region& region) {
    AccessList& list = mode == AccessMode::read    ? node.spec.reads
                       : mode == AccessMode::write ? node.spec.writes
                                                   : node.spec.accumulates;
    const bool whole = region == Region{.length = memory.size};
    list.push_back(whole ? Access(memory.buffer) : Access(memory.buffer, region));
    const Bytes bytes = bytes_of(region);
    node.uses.push_back({memory.buffer.id, reads(mode) ? bytes : 0, writes(mode) ? bytes : 0});
  }

  // Whether a part may have this access too: it writes no byte twice and writes no byte that it reads.
  static bool apart(const Planned& node, const Memory& memory, AccessMode mode, Bytes bytes) {
    return std::none_of(node.uses.begin(), node.uses.end(), [&](const Planned::Use& other) {
      if (other.buffer != memory.buffer.id) return false;
      return (writes(mode) && (bytes & (other.read | other.written)) != 0) ||
             (reads(mode) && (bytes & other.written) != 0);
    });
  }

  struct Place {
    const Memory* memory;
    Region region;
  };

  // Adds an access of exactly `length` bytes, possibly 0, to a part. None if the rank has no place for it.
  std::optional<Place> place_bytes(Planned& node, AccessMode mode, std::int64_t length) {
    for (int attempt = 0; attempt < 8; ++attempt) {
      const Memory& memory = random_.pick(memory_of(node.rank));
      if (memory.token) continue;
      const auto region = length == 0 ? Region{.length = 0} : region_of(memory, length);
      if (!region || !allowed(memory, mode, bytes_of(*region)) || !apart(node, memory, mode, bytes_of(*region)))
        continue;
      use(node, memory, mode, *region);
      return Place{&memory, *region};
    }
    return std::nullopt;
  }

  bool use_bytes(Planned& node, AccessMode mode, std::int64_t length) {
    return length == 0 || place_bytes(node, mode, length);
  }

  // Sometimes in two pieces.
  bool use_pieces(Planned& node, AccessMode mode, std::int64_t length) {
    const std::int64_t piece = length > 1 && random_.chance(20) ? random_.between(1, length - 1) : 0;
    return use_bytes(node, mode, piece) && use_bytes(node, mode, length - piece);
  }

  bool send_and_receive(Planned& node, std::int64_t sent, std::int64_t received) {
    if (sent == received && random_.chance(40)) return use_pieces(node, AccessMode::accumulate, sent);
    return use_pieces(node, AccessMode::read, sent) && use_pieces(node, AccessMode::write, received);
  }

  // Adds a shard of each member: one access per shard, or one for all if they are equal. Returns false if there is no
  // place. `own` gets the place of the member's own shard if it is one region.
  bool use_shards(Planned& node, AccessMode mode, const std::vector<std::int64_t>& sizes, std::size_t member,
                  std::optional<Place>& own) {
    const auto n     = static_cast<std::int64_t>(sizes.size());
    const bool alike = std::all_of(sizes.begin(), sizes.end(), [&](std::int64_t size) { return size == sizes[0]; });
    if (n > 1 && alike && random_.chance(60)) {
      const auto all = place_bytes(node, mode, n * sizes[0]);
      if (all && all->region.contiguous() && !all->memory->habitual) {
        own                = all;
        own->region.length = sizes[0];
        own->region.offset += static_cast<std::int64_t>(member) * sizes[0];
      }
      return all.has_value();
    }
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      const auto shard = place_bytes(node, mode, sizes[k]);
      if (!shard) return false;
      if (k == member) own = shard;
    }
    return true;
  }

  // One side holds all shards, the other the member's own shard: disjoint, or in place.
  bool use_whole_and_own(Planned& node, AccessMode whole, const std::vector<std::int64_t>& sizes, std::size_t member) {
    const auto single = whole == AccessMode::read ? AccessMode::write : AccessMode::read;
    std::optional<Place> own;
    if (!use_shards(node, whole, sizes, member, own)) return false;
    const auto touches_own = [&](const Planned::Use& other) {
      return other.buffer == own->memory->buffer.id && ((other.read | other.written) & bytes_of(own->region)) != 0;
    };
    if (own && random_.chance(50) && allowed(*own->memory, single, bytes_of(own->region)) &&
        std::count_if(node.uses.begin(), node.uses.end(), touches_own) <= 1) {
      use(node, *own->memory, single, own->region);
      return true;
    }
    return use_pieces(node, single, sizes[member]);
  }

  // `sizes[a][b]`: bytes that member a sends to b.
  bool use_slices(Planned& node, const std::vector<std::vector<std::int64_t>>& sizes, std::size_t member) {
    std::vector<std::int64_t> to, from;
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      to.push_back(sizes[member][k]);
      from.push_back(sizes[k][member]);
    }
    std::optional<Place> own;
    if (to == from && random_.chance(40)) return use_shards(node, AccessMode::accumulate, to, member, own);
    return use_shards(node, AccessMode::read, to, member, own) &&
           use_shards(node, AccessMode::write, from, member, own);
  }

  Random random_;
  RandomGraphOptions options_;
  Graph graph_;
  std::vector<std::vector<Memory>> memory_;  // by rank
  std::vector<Group> groups_;
  std::vector<LaneKind> lane_kinds_;
};

}  // namespace stepgraph::testing
