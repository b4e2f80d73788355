#pragma once
#include <cstdint>
#include <functional>
#include <vector>

namespace stepgraph {

// Something that needs `size` bytes from position `first` to position `last` of an order, both included.
struct PackItem {
  std::int64_t size;
  std::uint32_t first, last;
};

struct Packing {
  std::vector<std::int64_t> offsets;  // by item
  std::int64_t size = 0;              // one past the highest byte
};

// The most bytes needed at one position: no packing is smaller.
[[nodiscard]] std::int64_t most_at_once(const std::vector<PackItem>& items);

// Offsets such that items whose lifetimes overlap share no byte. Tries several greedy orders, then moves what sits on
// top to the front as long as that helps; `effort` bounds how many pairs of items are looked at. Deterministic.
[[nodiscard]] Packing pack(const std::vector<PackItem>& items, std::int64_t effort);

// The same when items whose lifetimes are apart may share only if `may_share(earlier, later)` says so. All that begin
// at position free_from[i] (at least 1) or later may share with item i: that alone is used where there are too many
// pairs.
[[nodiscard]] Packing pack(const std::vector<PackItem>& items, std::int64_t effort,
                           const std::function<bool(std::uint32_t, std::uint32_t)>& may_share,
                           const std::vector<std::uint32_t>& free_from);

}  // namespace stepgraph
