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

// Bounds of the work for very many items. The time of a packing then grows with the number of items, not with its
// square, and no heuristic ends at a certain number of items.
struct PackLimits {
  // Pairs that first fit counts for each item (FirstFit::num_pairs), in all orders that it tries. Up to about 10,000
  // items, all orders are tried.
  std::int64_t pairs_per_item = 16'000;
  // Items that skylines place, in all three together; but always one skyline. An item takes some microseconds.
  std::int64_t skyline_items = 300'000;
};

// The work that a packing took.
struct PackWork {
  std::int64_t num_pairs         = 0;  // of items, counted by first fit
  std::int64_t num_skyline_items = 0;  // placed by skylines
};

// Finds offsets such that items with overlapping lifetimes share no byte. Tries several heuristics, then moves the
// items on top to the front while that helps. `effort` bounds the number of item pairs that these moves count.
// Deterministic.
[[nodiscard]] Packing pack(const std::vector<PackItem>& items, std::int64_t effort, const PackLimits& limits = {},
                           PackWork* work = nullptr);

// The same, but items with disjoint lifetimes may share bytes only if `may_share(earlier, later)` is true. Every item
// that begins at turn free_from[i] (at least 1) or later may share with item i; with too many pairs, only this rule
// is used.
[[nodiscard]] Packing pack(const std::vector<PackItem>& items, std::int64_t effort,
                           const std::function<bool(std::uint32_t, std::uint32_t)>& may_share,
                           const std::vector<std::uint32_t>& free_from);

}  // namespace stepgraph
