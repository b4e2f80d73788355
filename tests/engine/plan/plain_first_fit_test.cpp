// Packing that compares an item with many others at once and ends at a bound, against plain code that looks at each
// pair and knows no bound: the same offsets, and the same count of pairs.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <limits>
#include <numeric>
#include <utility>

#include "engine/plan/apart_bound.hpp"
#include "engine/plan/first_fit.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Items  = std::vector<sg::PackItem>;
using Order  = std::vector<std::uint32_t>;
using stepgraph::testing::Random;

namespace {

// Lifetimes of a training step: most are short, some last for half of it. Few sizes, so that offsets are often equal.
Items lifetimes(Random& random, int count) {
  Items items;
  for (int i = 0; i < count; ++i) {
    const auto first  = static_cast<std::uint32_t>(random.below(static_cast<std::uint64_t>(count)));
    const auto length = random.below(static_cast<std::uint64_t>(random.chance(30) ? count / 2 + 1 : 6));
    const auto size   = random.chance(5) ? 0 : random.chance(50) ? random.between(1, 4) : random.between(1, 500);
    items.push_back({64 * size, first, first + static_cast<std::uint32_t>(length)});
  }
  return items;
}

bool overlap(const sg::PackItem& a, const sg::PackItem& b) { return a.first <= b.last && b.first <= a.last; }

// Compares an item with one placed item after another, in blocks by offset. A block of more than 64 becomes two.
class PlainFirstFit {
 public:
  PlainFirstFit(const Items& items, const sg::ItemPairs* apart) : items_(items), apart_(apart) {}

  sg::Packing place(const Order& order, std::int64_t at_most, std::int64_t max_pairs) {
    sg::Packing out{std::vector<std::int64_t>(items_.size(), -1), 0};
    const std::int64_t began = num_pairs;
    blocks_.assign(1, {});
    for (const std::uint32_t item : order) {
      const std::int64_t offset = items_[item].size == 0 ? 0 : lowest_gap(item, out);
      if (num_pairs - began > max_pairs) return {};
      out.offsets[item] = offset;
      out.size          = std::max(out.size, offset + items_[item].size);
      if (out.size > at_most) break;
      if (items_[item].size > 0) insert(item, out);
    }
    return out;
  }

  std::int64_t num_pairs = 0;

 private:
  std::int64_t lowest_gap(std::uint32_t item, const sg::Packing& placed) {
    std::int64_t offset = 0;
    for (const Order& block : blocks_) {
      std::uint32_t first = ~0u, last = 0;
      for (const std::uint32_t other : block) {
        first = std::min(first, items_[other].first);
        last  = std::max(last, items_[other].last);
      }
      if (apart_ == nullptr && (first > items_[item].last || last < items_[item].first)) continue;
      num_pairs += std::ssize(block);
      for (const std::uint32_t other : block) {
        if (!overlap(items_[item], items_[other]) && (apart_ == nullptr || !apart_->has(item, other))) continue;
        if (placed.offsets[other] - offset >= items_[item].size) return offset;
        offset = std::max(offset, placed.offsets[other] + items_[other].size);
      }
    }
    return offset;
  }

  void insert(std::uint32_t item, const sg::Packing& placed) {
    const auto is_below = [&](std::uint32_t other) { return placed.offsets[other] <= placed.offsets[item]; };
    auto at             = blocks_.begin();
    while (at != blocks_.end() && !at->empty() && is_below(at->back())) ++at;
    if (at == blocks_.end()) --at;
    at->insert(std::find_if_not(at->begin(), at->end(), is_below), item);
    if (at->size() <= 64) return;
    const Order upper(at->begin() + 32, at->end());
    at->resize(32);
    blocks_.insert(at + 1, upper);
  }

  const Items& items_;
  const sg::ItemPairs* apart_;
  std::vector<Order> blocks_;
};

// Items may share from some turns after the end of the earlier one on, and some of those on the same lane at once.
struct Sharing {
  std::vector<std::uint64_t> lanes;
  std::vector<std::uint32_t> free_from;

  Sharing(Random& random, const Items& items) {
    for (const sg::PackItem& item : items) {
      lanes.push_back(random.below(3));
      free_from.push_back(item.last + 1 + static_cast<std::uint32_t>(random.below(items.size() / 4 + 1)));
    }
  }
  [[nodiscard]] bool may_share(const Items& items, std::uint32_t earlier, std::uint32_t later) const {
    return items[later].first >= free_from[earlier] || lanes[earlier] == lanes[later];
  }
};

// All pairs are asked for, and the search ends at the bytes alive at one turn.
sg::Packing plain_pack(const Items& items, std::int64_t effort, const Sharing& sharing) {
  Items longer      = items;
  std::uint32_t end = 0;
  for (const sg::PackItem& item : items) end = std::max(end, item.last);
  for (std::size_t i = 0; i < items.size(); ++i)
    longer[i].last = std::max(items[i].last, std::min(sharing.free_from[i] - 1, end));
  const sg::Packing by_lifetimes = sg::pack(longer, effort);
  sg::ItemPairs apart(items.size());
  for (std::uint32_t a = 0; a < items.size(); ++a) {
    for (std::uint32_t b = 0; b < items.size(); ++b) {
      if (items[a].last < items[b].first && !sharing.may_share(items, a, b)) apart.add(a, b);
    }
  }
  sg::FirstFit fit(items, &apart);
  const sg::Packing found = sg::search(items, fit, sg::most_at_once(items), effort + effort / 2, effort);
  return !found.offsets.empty() && found.size < by_lifetimes.size ? found : by_lifetimes;
}

}  // namespace

TEST_CASE("first fit has the offsets and counts of a plain one", "[engine][packing]") {
  constexpr std::int64_t no_limit = std::numeric_limits<std::int64_t>::max();
  for (int seed = 0; seed < sg::testing::cases(40); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const Items items = lifetimes(random, seed % 4 == 0 ? 700 : 5 + 5 * seed);
    sg::ItemPairs apart(items.size());
    for (std::size_t i = 0; i < 2 * items.size(); ++i)
      apart.add(static_cast<std::uint32_t>(random.below(items.size())),
                static_cast<std::uint32_t>(random.below(items.size())));
    for (const sg::ItemPairs* const pairs : {static_cast<const sg::ItemPairs*>(nullptr), &std::as_const(apart)}) {
      sg::FirstFit fit(items, pairs);
      PlainFirstFit plain(items, pairs);
      Order order(items.size());
      std::iota(order.begin(), order.end(), 0u);
      std::int64_t size = 0, count = 0;
      for (int round = 0; round < 4; ++round) {  // with the same memory
        if (round > 0) random.shuffle(order);
        const std::int64_t at_most = round == 2 ? size * 9 / 10 : no_limit, most = round == 3 ? count / 2 : no_limit;
        const std::int64_t before = fit.num_pairs();
        const sg::Packing found = fit.place(order, at_most, most), expected = plain.place(order, at_most, most);
        REQUIRE(found.offsets == expected.offsets);
        REQUIRE(found.size == expected.size);
        REQUIRE(fit.num_pairs() == plain.num_pairs);
        if (round == 0) count = fit.num_pairs() - before;
        if (round == 0) size = found.size;
      }
    }
  }
}

TEST_CASE("packing that may not share freely has the offsets of a search without a better bound", "[engine][packing]") {
  int at_bound = 0, above = 0;
  for (int seed = 0; seed < sg::testing::cases(40); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const Items items = lifetimes(random, 10 + 6 * seed);
    const Sharing sharing(random, items);
    const std::int64_t effort = seed % 3 == 0 ? 300'000 : 3'000'000;  // the little one ends searches
    const sg::Packing found   = sg::pack(
          items, effort, [&](std::uint32_t a, std::uint32_t b) { return sharing.may_share(items, a, b); },
          sharing.free_from);
    const sg::Packing expected = plain_pack(items, effort, sharing);
    REQUIRE(found.offsets == expected.offsets);
    REQUIRE(found.size == expected.size);
    sg::ItemPairs apart(items.size());
    for (std::uint32_t a = 0; a < items.size(); ++a) {
      for (std::uint32_t b = 0; b < items.size(); ++b) {
        if (items[a].last < items[b].first && !sharing.may_share(items, a, b)) apart.add(a, b);
      }
    }
    const std::int64_t bound = sg::most_apart(items, apart);
    REQUIRE(bound <= found.size);
    REQUIRE(bound >= sg::most_at_once(items));
    ++(bound == found.size ? at_bound : above);
  }
  CHECK(at_bound >= sg::testing::at_least(4));  // both happen
  CHECK(above >= sg::testing::at_least(8));
}

TEST_CASE("the bytes of items that must stay apart are at most those of the largest such set", "[engine][packing]") {
  int equal = 0;
  for (int seed = 0; seed < 60; ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const Items items = lifetimes(random, 10);
    sg::ItemPairs apart(items.size());
    for (int i = 0; i < 15; ++i)
      apart.add(static_cast<std::uint32_t>(random.below(10)), static_cast<std::uint32_t>(random.below(10)));
    std::int64_t most = 0;
    for (std::uint32_t set = 0; set < 1u << items.size(); ++set) {
      std::int64_t sum = 0;
      bool is_apart    = true;
      for (std::uint32_t a = 0; a < items.size() && is_apart; ++a) {
        if ((set >> a & 1) == 0) continue;
        sum += items[a].size;
        for (std::uint32_t b = 0; b < a; ++b)
          is_apart &= (set >> b & 1) == 0 || overlap(items[a], items[b]) || apart.has(a, b);
      }
      if (is_apart) most = std::max(most, sum);
    }
    const std::int64_t found = sg::most_apart(items, apart);
    CHECK(found <= most);
    CHECK(found >= sg::most_at_once(items));
    equal += found == most;
  }
  CHECK(equal >= 30);
  CHECK(sg::most_apart({}, sg::ItemPairs(0)) == 0);
}
