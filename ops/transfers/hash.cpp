#include "ops/transfers/hash.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/transfers/hash.hpp"
#include "ops/tape/streams.hpp"

namespace stepgraph {
namespace {

constexpr std::size_t word_bytes = sizeof(std::uint64_t);
constexpr std::size_t tile_bytes = std::size_t{1} << 18;  // whole words

// S. Vigna's finaliser of splitmix64 (D. Stafford's "Mix13").
constexpr std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// The contribution of the words of `bytes` to the hash. `begin` is their offset in the whole, a multiple of the word
// size.
std::uint64_t sum_of_words(std::span<const std::byte> bytes, std::size_t begin) {
  constexpr std::uint64_t step = 0x9e3779b97f4a7c15u;
  std::uint64_t sum = 0, place = (begin / word_bytes + 1) * step;
  std::size_t at = 0;
  for (; at + word_bytes <= bytes.size(); at += word_bytes, place += step) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data() + at, word_bytes);
    sum += mix(word + place);
  }
  if (at < bytes.size()) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, bytes.size() - at);
    sum += mix(word + place);
  }
  return sum;
}

struct Tile {
  std::size_t value, begin;
};

}  // namespace

std::uint64_t hash_bytes(std::span<const std::byte> bytes) noexcept {
  return mix(bytes.size()) + sum_of_words(bytes, 0);
}

std::uint64_t join_hashes(std::uint64_t so_far, std::uint64_t next) noexcept { return mix(so_far) + next; }

std::string hash_text(std::uint64_t hash) {
  std::string digits(16, '0');
  for (auto digit = digits.rbegin(); digit != digits.rend(); ++digit, hash >>= 4)
    *digit = "0123456789abcdef"[hash & 15];
  return digits;
}

Node hash_bytes(Graph& graph, const HashBytes& spec) {
  const auto values = spec.values.view();
  if (num_bytes(graph, spec.hashes) != static_cast<std::int64_t>(word_bytes * values.size()) ||
      graph.spec(spec.hashes.buffer).type != DType::i64) {
    throw Error(ErrorKind::config,
                str("ops: hash_bytes '", spec.name, "': ", num_bytes(graph, spec.hashes), " bytes of ",
                    graph.spec(spec.hashes.buffer).type, " for ", values.size(), " hashes (one i64 for each)"));
  }
  std::vector<Tile> tiles;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i].region.length != Access::whole && values[i].region.count != 1) {
      throw Error(ErrorKind::config, str("ops: hash_bytes '", spec.name, "': ", to_string(values[i].region), " of ",
                                         graph.describe(values[i].buffer), " (one range)"));
    }
    const auto size = static_cast<std::size_t>(num_bytes(graph, values[i]));
    for (std::size_t begin = 0; begin < size; begin += tile_bytes) tiles.push_back({i, begin});
  }
  const double bytes = static_cast<double>(num_bytes(graph, spec.values));
  return graph.add({.name     = spec.name,
                    .lane     = graph.lane(graph.spec(spec.hashes.buffer).rank, spec.lane),
                    .reads    = spec.values,
                    .writes   = spec.hashes,
                    .op       = "hash_bytes",
                    .parallel = true,
                    .device   = true,
                    .cost     = {.flops = bytes, .bytes_moved = bytes},
                    .labels   = spec.labels},
                   [tiles = std::move(tiles)](const Context& context) {
                     const std::span<std::int64_t> hashes = context.write<std::int64_t>();
                     if constexpr (cuda::built) {
                       if (const DeviceQueue* queue = context.device()) {
                         for (std::size_t i = 0; i < hashes.size(); ++i)
                           cuda::hash_bytes(*queue, context.read<std::byte>(i), &hashes[i]);
                         return;
                       }
                     }
                     for (std::size_t i = 0; i < hashes.size(); ++i) {
                       hashes[i] = static_cast<std::int64_t>(mix(context.read<std::byte>(i).size()));
                     }
                     context.parallel_for(static_cast<std::int64_t>(tiles.size()), [&](std::int64_t t) {
                       const auto [value, begin] = tiles[static_cast<std::size_t>(t)];
                       const auto all            = context.read<std::byte>(value);
                       const auto part           = all.subspan(begin, std::min(tile_bytes, all.size() - begin));
                       std::atomic_ref(hashes[value])
                           .fetch_add(static_cast<std::int64_t>(sum_of_words(part, begin)), std::memory_order_relaxed);
                     });
                   });
}

}  // namespace stepgraph
