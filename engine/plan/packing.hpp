#pragma once
#include <cstdint>
#include <functional>
#include <vector>

namespace stepgraph {

// An item that needs `size` bytes from turn `first` to turn `last` of an order, both included. Turns are
// numbered without large gaps: tables of them are made.
struct PackItem {
  std::int64_t size;
  std::uint32_t first, last;
};

struct Packing {
  std::vector<std::int64_t> offsets;  // by item
  std::int64_t size = 0;              // one past the highest byte
};

// The most bytes needed at one turn: no packing is smaller.
[[nodiscard]] std::int64_t most_at_once(const std::vector<PackItem>& items);

// Finds offsets such that items with overlapping lifetimes share no byte. Tries several heuristics, then moves the
// items on top to the front while that helps. `effort` bounds the number of item pairs that these moves examine, which
// take about a nanosecond each. Beyond that, time grows almost linearly with the number of items. Deterministic.
[[nodiscard]] Packing pack(const std::vector<PackItem>& items, std::int64_t effort);

// The same, but items with disjoint lifetimes may share bytes only if `may_share(earlier, later)` is true. Every item
// that begins at turn free_from[i] (at least 1) or later may share with item i; with too many pairs, only this rule
// is used.
[[nodiscard]] Packing pack(const std::vector<PackItem>& items, std::int64_t effort,
                           const std::function<bool(std::uint32_t, std::uint32_t)>& may_share,
                           const std::vector<std::uint32_t>& free_from);

}  // namespace stepgraph
