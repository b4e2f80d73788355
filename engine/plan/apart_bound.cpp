#include "engine/plan/apart_bound.hpp"

#include <algorithm>
#include <numeric>

namespace stepgraph {
namespace {

constexpr std::size_t max_tried = 16;  // turns

using Bits = std::vector<std::uint64_t>;

void set_bit(Bits& bits, std::uint32_t i) { bits[i / 64] |= std::uint64_t{1} << i % 64; }
bool has_bit(const Bits& bits, std::uint32_t i) { return (bits[i / 64] >> i % 64 & 1) != 0; }

std::vector<std::uint32_t> sorted_by(const std::vector<PackItem>& items, const auto& key) {
  std::vector<std::uint32_t> order(items.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return key(items[a]) < key(items[b]); });
  return order;
}

// By item: a bit for each item that it may not share with. Items that overlap are those that began by its end, without
// those that ended before its begin: n * n / 64 words in all, and no pair is looked at.
std::vector<Bits> conflicts(const std::vector<PackItem>& items, const ItemPairs& apart) {
  const auto first                          = [](const PackItem& item) { return item.first; };
  const auto last                           = [](const PackItem& item) { return item.last; };
  const std::vector<std::uint32_t> by_begin = sorted_by(items, first), by_end = sorted_by(items, last);
  const std::size_t words = (items.size() + 63) / 64;
  std::vector<Bits> rows(items.size());
  Bits begun(words, 0), ended(words, 0);
  auto next = by_begin.begin();
  for (const std::uint32_t item : by_end) {
    for (; next != by_begin.end() && items[*next].first <= items[item].last; ++next) set_bit(begun, *next);
    rows[item] = begun;
  }
  next = by_end.begin();
  for (const std::uint32_t item : by_begin) {
    for (; next != by_end.end() && items[*next].last < items[item].first; ++next) set_bit(ended, *next);
    const auto pairs = apart.row(item);
    for (std::size_t i = 0; i < words; ++i) rows[item][i] = (rows[item][i] & ~ended[i]) | pairs[i];
  }
  return rows;
}

// The turns with the most bytes alive, that with most first.
std::vector<std::uint32_t> fullest_turns(const std::vector<PackItem>& items) {
  std::uint32_t end = 0;
  for (const PackItem& item : items) end = std::max(end, item.last + 1);
  std::vector<std::int64_t> alive(std::size_t{end} + 1, 0);
  for (const PackItem& item : items) {
    alive[item.first] += item.size;
    alive[std::size_t{item.last} + 1] -= item.size;
  }
  std::partial_sum(alive.begin(), alive.end(), alive.begin());
  std::vector<std::uint32_t> turns(end);
  std::iota(turns.begin(), turns.end(), 0u);
  const std::size_t count = std::min(max_tried, turns.size());
  std::partial_sort(turns.begin(), turns.begin() + static_cast<std::ptrdiff_t>(count), turns.end(),
                    [&](auto a, auto b) { return alive[a] != alive[b] ? alive[a] > alive[b] : a < b; });
  turns.resize(count);
  return turns;
}

}  // namespace

std::int64_t most_apart(const std::vector<PackItem>& items, const ItemPairs& apart) {
  const std::vector<Bits> rows       = conflicts(items, apart);
  std::vector<std::uint32_t> by_size = sorted_by(items, [](const PackItem& item) { return -item.size; });
  while (!by_size.empty() && items[by_size.back()].size == 0) by_size.pop_back();  // these may lie anywhere
  std::int64_t most = 0;
  Bits left((items.size() + 63) / 64);  // items that may share with none of the set
  for (const std::uint32_t turn : fullest_turns(items)) {
    std::int64_t sum = 0;
    std::fill(left.begin(), left.end(), ~std::uint64_t{0});
    const auto add = [&](std::uint32_t item) {
      sum += items[item].size;
      for (std::size_t i = 0; i < left.size(); ++i) left[i] &= rows[item][i];
      left[item / 64] &= ~(std::uint64_t{1} << item % 64);
    };
    for (const std::uint32_t item : by_size) {
      if (items[item].first <= turn && turn <= items[item].last) add(item);
    }
    for (const std::uint32_t item : by_size) {
      if (has_bit(left, item)) add(item);
    }
    most = std::max(most, sum);
  }
  return most;
}

}  // namespace stepgraph
