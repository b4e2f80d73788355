#pragma once
#include <cstdint>
#include <limits>
#include <vector>

#include "engine/plan/packing.hpp"

// Packing by placing items one after another. Internal to engine/.
namespace stepgraph {

// Pairs of items that must not share a byte, although their lifetimes are disjoint.
class ItemPairs {
 public:
  explicit ItemPairs(std::size_t num_items) : words_((num_items + 63) / 64), bits_(words_ * num_items, 0) {}
  void add(std::uint32_t a, std::uint32_t b) {
    set(a, b);
    set(b, a);
  }
  [[nodiscard]] bool has(std::uint32_t a, std::uint32_t b) const { return bits_[a * words_ + b / 64] >> b % 64 & 1; }

 private:
  void set(std::uint32_t row, std::uint32_t bit) { bits_[row * words_ + bit / 64] |= std::uint64_t{1} << bit % 64; }
  std::size_t words_;
  std::vector<std::uint64_t> bits_;  // rows of words_
};

// Places items in a given order, each at the lowest offset that the items already placed allow. An item is compared
// with the placed items from the bottom up, until a gap is found: memory is read in sequence, so that a pair takes
// about a nanosecond.
class FirstFit {
 public:
  // `apart`: null: only items with overlapping lifetimes must not share.
  explicit FirstFit(const std::vector<PackItem>& items, const ItemPairs* apart = nullptr)
      : items_(items), apart_(apart) {}

  // Stops once the size exceeds `at_most`; the remaining items are then not placed. Returns a packing without offsets
  // if it would examine more than `max_pairs` pairs.
  Packing place(const std::vector<std::uint32_t>& order,
                std::int64_t at_most   = std::numeric_limits<std::int64_t>::max(),
                std::int64_t max_pairs = std::numeric_limits<std::int64_t>::max());

  [[nodiscard]] std::int64_t num_pairs() const noexcept { return num_pairs_; }  // examined so far

 private:
  struct Placed {
    std::int64_t begin, end;
    std::uint32_t first, last, item;
  };
  // Placed items by offset, in blocks, so that an insertion moves few of them. A block knows in which turns its
  // items live.
  struct Block {
    std::vector<Placed> items;
    std::uint32_t first = std::numeric_limits<std::uint32_t>::max(), last = 0;
    void note(const Placed& item);
  };
  [[nodiscard]] std::int64_t lowest_gap(std::uint32_t item);
  void insert(const Placed& item);
  Block& new_block(std::size_t place);  // an empty one, among the blocks in use
  void split(std::size_t place);        // a full block into two

  const std::vector<PackItem>& items_;
  const ItemPairs* apart_;
  std::vector<Block> blocks_;  // the first num_blocks_ are in use; all keep their memory
  std::size_t num_blocks_ = 0;
  std::int64_t num_pairs_ = 0;
};

// Places the items in several orders. While effort is left, items that reach the top move to the front and all are
// placed again. `effort_of_orders` bounds the pairs that the first placements of all orders examine, and `effort` all
// pairs. Returns a packing without offsets if they are too small for one order.
[[nodiscard]] Packing search(const std::vector<PackItem>& items, FirstFit& fit, std::int64_t lower_bound,
                             std::int64_t effort, std::int64_t effort_of_orders);

// Starts from a packing and places the items again from the lowest up. Items that reach the top move to a random
// place earlier in that sequence; a move is kept unless the packing grows.
[[nodiscard]] Packing improve(const std::vector<PackItem>& items, FirstFit& fit, Packing best, std::int64_t lower_bound,
                              std::int64_t effort);

// The items by their first turn.
[[nodiscard]] std::vector<std::uint32_t> by_first(const std::vector<PackItem>& items);

}  // namespace stepgraph
