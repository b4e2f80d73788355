#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>
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
  [[nodiscard]] std::span<const std::uint64_t> row(std::uint32_t item) const {  // bit i: the pair with item i
    return std::span(bits_).subspan(item * words_, words_);
  }

 private:
  void set(std::uint32_t row, std::uint32_t bit) { bits_[row * words_ + bit / 64] |= std::uint64_t{1} << bit % 64; }
  std::size_t words_;
  std::vector<std::uint64_t> bits_;  // rows of words_
};

// Calls `visit(i)` for each bit i that is set, the lowest first.
void for_each_bit(std::span<const std::uint64_t> words, const auto& visit) {
  for (std::size_t i = 0; i < words.size(); ++i) {
    for (std::uint64_t bits = words[i]; bits != 0; bits &= bits - 1)
      visit(static_cast<std::uint32_t>(64 * i + static_cast<std::size_t>(std::countr_zero(bits))));
  }
}

// Places items in a given order, each at the lowest offset that the items already placed allow. The placed items lie in
// blocks, sorted by offset. A block has a word for each of a few spans of turns, with a bit for each item that lives
// then. So an item is compared with few others: about a tenth of all in a training step.
class FirstFit {
 public:
  // `items` and `apart` must outlive this. Without `apart`, only items with overlapping lifetimes must not share.
  explicit FirstFit(const std::vector<PackItem>& items, const ItemPairs* apart = nullptr);

  // Stops once the size exceeds `at_most`; the remaining items are then not placed. Returns a packing without offsets
  // if it would examine more than `max_pairs` pairs.
  Packing place(const std::vector<std::uint32_t>& order,
                std::int64_t at_most   = std::numeric_limits<std::int64_t>::max(),
                std::int64_t max_pairs = std::numeric_limits<std::int64_t>::max());

  // Pairs of an item and a placed one in the blocks that it is compared with, so far: a measure of the work that does
  // not depend on the machine.
  [[nodiscard]] std::int64_t num_pairs() const noexcept { return num_pairs_; }

 private:
  static constexpr std::size_t max_in_block = 64, num_spans = 32;
  struct Placed {
    std::int64_t begin, end;
    std::uint32_t first, last, item;
    std::uint16_t first_span, last_span;
  };
  // Placed items by offset, in blocks, so that an insertion moves few of them. A block knows in which turns its
  // items live.
  struct Block {
    std::size_t size    = 0;
    std::uint32_t first = std::numeric_limits<std::uint32_t>::max(), last = 0;
    std::array<std::uint64_t, num_spans> alive;  // bit i: the i-th item lives in the span
    std::array<Placed, max_in_block + 1> items;  // one more: a full block is split after an insertion

    void clear();
    void append(const Placed& item);
    void insert(const Placed& item);
    [[nodiscard]] bool meets(const Placed& item) const { return first <= item.last && item.first <= last; }
    // Bits of the items that live in one of the spans of an item: those with overlapping lifetimes, and some more.
    [[nodiscard]] std::uint64_t near(const Placed& item) const;
  };
  class Gap;
  // Visits the items of a block that overlap; true: the gap is found.
  static bool ends_in(const Block& block, const Placed& item, Gap& gap, const auto& before);
  [[nodiscard]] Placed unplaced(std::uint32_t item) const;
  [[nodiscard]] std::int64_t lowest_gap(const Placed& item);
  // With pairs of `apart`: where an item has few of them, and where it has many. The result is the same.
  [[nodiscard]] std::int64_t lowest_gap_apart(const Placed& item);
  [[nodiscard]] std::int64_t lowest_gap_among_few(const Placed& item);
  [[nodiscard]] std::int64_t lowest_gap_among_many(const Placed& item);
  void insert(const Placed& item);
  void new_block(std::size_t place);  // an empty one, among the blocks in use
  void split(std::size_t place);      // a full block into two

  // A placed item of a pair of `apart`: its bytes, and the place of its block in by_offset_.
  struct Apart {
    std::size_t place;
    std::int64_t begin, end;
  };

  const std::vector<PackItem>& items_;
  const ItemPairs* pairs_;
  std::uint32_t turns_per_span_;
  std::vector<Block> blocks_;               // those in use come first; all keep their memory
  std::vector<std::uint32_t> by_offset_;    // the blocks in use
  std::vector<std::uint32_t> apart_begin_;  // of an item's part of apart_; empty: there are no such pairs
  std::vector<std::uint32_t> apart_;        // items
  // Only with such pairs:
  std::vector<std::uint32_t> block_of_;  // by item, or no_block
  std::vector<std::int64_t> offset_of_;  // by item that has a block
  std::vector<std::size_t> place_of_;    // by block: where by_offset_ has it
  std::vector<Apart> apart_now_;         // those of the item to place
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
