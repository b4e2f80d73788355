// The parts of packing that examine few pairs of items, against plain ones that examine all.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <numeric>

#include "engine/plan/first_fit.hpp"
#include "engine/plan/skyline.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Items  = std::vector<sg::PackItem>;
using stepgraph::testing::Random;

namespace {

Items random_items(Random& random, int count, int longest) {
  Items items;
  for (int i = 0; i < count; ++i) {
    const auto first = static_cast<std::uint32_t>(random.below(static_cast<std::uint64_t>(count)));
    const auto last  = first + static_cast<std::uint32_t>(random.below(static_cast<std::uint64_t>(longest)));
    items.push_back({random.between(0, 12) * 64, first, last});
  }
  return items;
}

bool overlap(const sg::PackItem& a, const sg::PackItem& b) { return a.first <= b.last && b.first <= a.last; }

// The lowest offset at which an item meets no placed one, among 0 and the ends of the placed ones.
template <class Conflict>
std::int64_t lowest(const Items& items, const std::vector<std::int64_t>& offsets,
                    const std::vector<std::uint32_t>& placed, std::uint32_t item, const Conflict& conflict) {
  std::vector<std::int64_t> tried{0};
  for (const std::uint32_t other : placed) tried.push_back(offsets[other] + items[other].size);
  std::sort(tried.begin(), tried.end());
  for (const std::int64_t offset : tried) {
    const bool free = std::all_of(placed.begin(), placed.end(), [&](std::uint32_t other) {
      return !conflict(item, other) || offset + items[item].size <= offsets[other] ||
             offsets[other] + items[other].size <= offset;
    });
    if (free) return offset;
  }
  return tried.back();
}

// Burke's heuristic with the height above every position.
sg::Packing plain_skyline(const Items& items, sg::SkylinePreference preference) {
  std::uint32_t end = 0;
  for (const sg::PackItem& item : items) end = std::max(end, item.last + 1);
  std::vector<std::int64_t> heights(end, 0);
  sg::Packing out{std::vector<std::int64_t>(items.size(), 0), 0};
  std::vector<std::uint32_t> left = sg::by_first(items);
  while (!left.empty()) {
    const auto low      = std::min_element(heights.begin(), heights.end());
    const auto behind   = std::find_if(low, heights.end(), [&](std::int64_t height) { return height != *low; });
    const auto begin    = static_cast<std::uint32_t>(low - heights.begin()),
               position = static_cast<std::uint32_t>(behind - heights.begin());
    const auto weight   = [&](std::uint32_t i) {
      const double length = items[i].last - items[i].first + 1.0, size = static_cast<double>(items[i].size);
      if (preference == sg::SkylinePreference::long_lived) return std::pair(length, size);
      return preference == sg::SkylinePreference::large ? std::pair(size, length) : std::pair(size * length, size);
    };
    auto best = left.end();
    for (auto at = left.begin(); at != left.end(); ++at) {
      if (items[*at].first < begin || items[*at].last >= position) continue;
      if (best == left.end() || weight(*at) > weight(*best)) best = at;
    }
    if (best == left.end()) {
      std::int64_t raised = std::numeric_limits<std::int64_t>::max();
      if (low != heights.begin()) raised = std::min(raised, *std::prev(low));
      if (behind != heights.end()) raised = std::min(raised, *behind);
      std::fill(low, behind, raised);
      continue;
    }
    const sg::PackItem& item = items[*best];
    out.offsets[*best]       = *low;
    out.size                 = std::max(out.size, *low + item.size);
    for (std::uint32_t i = item.first; i <= item.last; ++i) heights[i] += item.size;
    left.erase(best);
  }
  return out;
}

}  // namespace

TEST_CASE("first fit finds the lowest gap for every item, in any order", "[engine][packing]") {
  for (int seed = 0; seed < sg::testing::cases(60); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const Items items = random_items(random, 20 + 4 * seed, seed % 3 == 0 ? 100 : 12);
    std::vector<std::uint32_t> order(items.size()), placed;
    std::iota(order.begin(), order.end(), 0u);
    random.shuffle(order);
    sg::ItemPairs apart(items.size());
    const bool more = seed % 2 == 1;  // items whose lifetimes are disjoint, but which must not share bytes
    for (std::uint32_t a = 0; a < items.size(); ++a) {
      for (std::uint32_t b = 0; b < a; ++b) {
        if (more && random.chance(10)) apart.add(a, b);
      }
    }
    const auto conflict = [&](std::uint32_t a, std::uint32_t b) {
      return overlap(items[a], items[b]) || (more && apart.has(a, b));
    };
    const sg::Packing found = sg::FirstFit(items, more ? &apart : nullptr).place(order);
    std::int64_t size       = 0;
    for (const std::uint32_t item : order) {
      // An item of no bytes may lie anywhere below what it meets.
      if (items[item].size > 0) REQUIRE(found.offsets[item] == lowest(items, found.offsets, placed, item, conflict));
      if (items[item].size > 0) placed.push_back(item);
      size = std::max(size, found.offsets[item] + items[item].size);
    }
    REQUIRE(found.size == size);
  }
}

TEST_CASE("the skyline is filled with the same items as by a plain search", "[engine][packing]") {
  using Preference      = sg::SkylinePreference;
  const auto preference = GENERATE(Preference::long_lived, Preference::large, Preference::both);
  for (int seed = 0; seed < sg::testing::cases(60); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const Items items          = random_items(random, 1 + 3 * seed, seed % 3 == 0 ? 60 : 8);
    const sg::Packing expected = plain_skyline(items, preference), found = sg::pack_by_skyline(items, preference);
    REQUIRE(found.offsets == expected.offsets);
    REQUIRE(found.size == expected.size);
  }
}

TEST_CASE("first fit examines no more pairs than it may, whatever the number of items", "[engine][packing]") {
  // Long lives of many sizes: no packing reaches the lower bound at once, and half of all pairs conflict.
  const auto pairs_per_item = [](int count, std::int64_t effort) {
    Random random(7);
    const Items items = random_items(random, count, count / 2);
    sg::FirstFit fit(items);
    const sg::Packing found = sg::search(items, fit, 0, effort, 1'500LL * count);
    CHECK(found.offsets.empty() == (count > 4'000));  // one order needs more
    return fit.num_pairs() / count;
  };
  for (const std::int64_t effort : {0, 1'000'000}) {
    CAPTURE(effort);
    for (const int count : {2'000, 4'000, 8'000}) CHECK(pairs_per_item(count, effort) <= 1'508 + effort / count);
  }
}
