#include "engine/plan/packing.hpp"
#include <algorithm>
#include <catch2/catch_test_macros.hpp>

#include "tests/support/graphs/random_graph.hpp"

namespace sg = stepgraph;
using stepgraph::testing::Random;

namespace {

constexpr std::int64_t effort = 20'000'000;

bool overlap(const sg::PackItem& a, const sg::PackItem& b) { return a.first <= b.last && b.first <= a.last; }

bool share_bytes(const std::vector<sg::PackItem>& items, const sg::Packing& packing, std::size_t a, std::size_t b) {
  return packing.offsets[a] < packing.offsets[b] + items[b].size &&
         packing.offsets[b] < packing.offsets[a] + items[a].size;
}

std::vector<sg::PackItem> random_items(std::uint64_t seed, int count, int longest) {
  Random random(seed);
  std::vector<sg::PackItem> items;
  for (int i = 0; i < count; ++i) {
    const auto first = static_cast<std::uint32_t>(random.below(static_cast<std::uint64_t>(2 * count)));
    const auto last  = first + static_cast<std::uint32_t>(random.below(static_cast<std::uint64_t>(longest)));
    items.push_back({random.between(0, 100) * 64, first, last});
  }
  return items;
}

}  // namespace

TEST_CASE("the peak counts both ends of a lifetime", "[engine][packing]") {
  CHECK(sg::most_at_once({}) == 0);
  CHECK(sg::most_at_once({{10, 0, 1}, {20, 1, 2}, {40, 2, 3}}) == 60);
  CHECK(sg::most_at_once({{10, 0, 0}, {20, 1, 1}, {15, 2, 2}}) == 20);
}

TEST_CASE("items whose lifetimes overlap share no byte, and packing comes close to the lower bound",
          "[engine][packing]") {
  double total = 0;
  for (std::uint64_t seed = 0; seed < 24; ++seed) {
    CAPTURE(seed);
    const auto items   = random_items(seed, 20 + static_cast<int>(seed) * 25, seed % 2 == 0 ? 12 : 80);
    const auto packing = sg::pack(items, effort);
    for (std::size_t a = 0; a < items.size(); ++a) {
      REQUIRE(packing.offsets[a] >= 0);
      REQUIRE(packing.offsets[a] + items[a].size <= packing.size);
      for (std::size_t b = a + 1; b < items.size(); ++b) {
        if (overlap(items[a], items[b])) REQUIRE_FALSE(share_bytes(items, packing, a, b));
      }
    }
    const auto ratio = static_cast<double>(packing.size) / static_cast<double>(sg::most_at_once(items));
    CHECK(ratio <= 1.05);
    total += ratio;
  }
  CHECK(total / 24 <= 1.01);
}

TEST_CASE("a packing with little effort is still sound", "[engine][packing]") {
  const auto items = random_items(3, 400, 50);
  const std::vector<std::uint32_t> never(items.size(), ~0u);
  std::vector<std::uint32_t> at_once;
  for (const sg::PackItem& item : items) at_once.push_back(item.last + 1);
  for (const std::int64_t little : {0, 1000, 100'000}) {
    const auto packing = sg::pack(items, little);
    const auto apart   = sg::pack(
          items, little, [](std::uint32_t, std::uint32_t) { return false; }, never);
    const auto shared = sg::pack(
        items, little, [](std::uint32_t, std::uint32_t) { return true; }, at_once);
    for (std::size_t a = 0; a < items.size(); ++a) {
      for (std::size_t b = a + 1; b < items.size(); ++b) {
        REQUIRE_FALSE(share_bytes(items, apart, a, b));
        if (!overlap(items[a], items[b])) continue;
        REQUIRE_FALSE(share_bytes(items, packing, a, b));
        REQUIRE_FALSE(share_bytes(items, shared, a, b));
      }
    }
  }
}

TEST_CASE("items that may not share stay apart, in either order", "[engine][packing]") {
  const std::vector<sg::PackItem> items{{64, 0, 0}, {64, 1, 1}, {64, 2, 2}};
  const auto only_first_and_last = [](std::uint32_t a, std::uint32_t b) { return a == 0 && b == 2; };
  const auto packing             = sg::pack(items, effort, only_first_and_last, {2, 3, 3});
  CHECK(packing.size == 128);
  CHECK(packing.offsets[0] == packing.offsets[2]);
  CHECK(packing.offsets[0] != packing.offsets[1]);
}

TEST_CASE("the work of a packing grows with the number of items, and its size does not jump where a bound is reached",
          "[engine][packing]") {
  // Bounds that are reached between 500 and 4,000 items.
  constexpr sg::PackLimits limits{.pairs_per_item = 400, .skyline_items = 3'000};
  constexpr std::int64_t little = 10'000;
  std::int64_t before           = 0;  // skyline items for half as many items
  for (const int count : {500, 1'000, 2'000, 4'000, 8'000}) {
    CAPTURE(count);
    const auto items = random_items(11, count, count / 2);  // many lives at once: every bound counts
    sg::PackWork work;
    const auto packing = sg::pack(items, little, limits, &work);
    CHECK(work.num_pairs <= limits.pairs_per_item * count + little + 8 * count);  // and the rest of an item's scan
    CHECK(work.num_skyline_items >= count);
    CHECK(work.num_skyline_items <= std::max<std::int64_t>(count, limits.skyline_items));
    CHECK((before == 0 || work.num_skyline_items <= 2 * before));
    CHECK(static_cast<double>(packing.size) <= 1.1 * static_cast<double>(sg::most_at_once(items)));
    before = work.num_skyline_items;
  }
}

TEST_CASE("first fit is tried for any number of items, if few of them live at once", "[engine][packing]") {
  // One order examines all pairs in the worst case, and far fewer here.
  constexpr sg::PackLimits limits{.pairs_per_item = 400};
  int num_hard = 0;  // not solved by the skylines alone
  for (const int count : {2'000, 4'000, 8'000, 16'000, 32'000}) {
    CAPTURE(count);
    const auto items = random_items(5, count, 60);
    sg::PackWork work;
    const auto packing = sg::pack(items, 0, limits, &work);
    const bool hard    = packing.size > sg::most_at_once(items);
    num_hard += hard;
    if (hard) CHECK(work.num_pairs > 0);
    CHECK(work.num_pairs <= limits.pairs_per_item * count + 8 * count);
    CHECK(static_cast<double>(packing.size) <= 1.1 * static_cast<double>(sg::most_at_once(items)));
  }
  CHECK(num_hard >= 2);
}
