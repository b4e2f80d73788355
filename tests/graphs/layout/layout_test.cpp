#include "graphs/layout/layout.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <random>
#include <set>

#include "engine/base/error.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::Message;
using Catch::Matchers::MessageMatches;

namespace {

std::vector<sg::Rank> ranks(std::initializer_list<int> numbers) {
  std::vector<sg::Rank> list;
  for (const int number : numbers) list.push_back(sg::Rank{number});
  return list;
}

std::vector<sg::Axes> all_sets() {
  std::vector<sg::Axes> sets;
  for (unsigned bits = 0; bits < (1u << sg::all_axes.size()); ++bits) {
    sg::Axes set;
    for (std::size_t i = 0; i < sg::all_axes.size(); ++i) {
      if (bits >> i & 1) set = set | sg::all_axes[i];
    }
    sets.push_back(set);
  }
  return sets;
}

sg::LayoutSpec random_spec(std::mt19937& random) {
  const auto degree = [&] { return static_cast<int>(1 + random() % 5); };
  std::vector<std::string> names{"pp", "dp", "tp"};
  std::shuffle(names.begin(), names.end(), random);
  return {.dp                = degree(),
          .tp                = degree(),
          .pp                = degree(),
          .order             = names[0] + "-" + names[1] + "-" + names[2],
          .devices_per_node  = static_cast<int>(1 + random() % 9),
          .sequence_parallel = random() % 2 == 0};
}

// Calls `check` with random layouts.
template <class Check>
void for_random_layouts(Check check) {
  std::mt19937 random(7);
  for (int i = 0; i < sg::testing::cases(400); ++i) {
    const sg::Layout layout(random_spec(random));
    INFO(layout);
    check(layout);
  }
}

}  // namespace

TEST_CASE("in the default order tp varies fastest and pp slowest", "[graphs][layout]") {
  const sg::Layout layout({.dp = 2, .tp = 4, .pp = 3}, 24);
  CHECK(layout.num_ranks() == 24);
  for (int pp = 0; pp < 3; ++pp) {
    for (int dp = 0; dp < 2; ++dp) {
      for (int tp = 0; tp < 4; ++tp) {
        const sg::Coord coord{.dp = dp, .tp = tp, .pp = pp};
        CHECK(layout.rank(coord) == sg::Rank{(pp * 2 + dp) * 4 + tp});
        CHECK(layout.coord(layout.rank(coord)) == coord);
      }
    }
  }
}

TEST_CASE("with order dp-tp-pp the rank is dp*(tp_size*pp_size) + tp*pp_size + pp", "[graphs][layout]") {
  const sg::Layout layout({.dp = 2, .tp = 4, .pp = 3, .order = "dp-tp-pp"});
  for (int r = 0; r < layout.num_ranks(); ++r) {
    const sg::Coord coord = layout.coord(sg::Rank{r});
    CHECK(coord.dp * (4 * 3) + coord.tp * 3 + coord.pp == r);
    CHECK(layout.rank(coord) == sg::Rank{r});
  }
}

TEST_CASE("in any layout the coordinates are the digits of the rank", "[graphs][layout]") {
  for_random_layouts([](const sg::Layout& layout) {
    std::set<sg::Coord> seen;
    for (int r = 0; r < layout.num_ranks(); ++r) {
      const sg::Coord coord = layout.coord(sg::Rank{r});
      int digits            = 0;
      for (const sg::Axis axis : layout.order()) digits = digits * layout.degree(axis) + coord[axis];
      CHECK(digits == r);
      CHECK(layout.rank(coord) == sg::Rank{r});
      seen.insert(coord);
    }
    CHECK(static_cast<int>(seen.size()) == layout.num_ranks());
  });
}

TEST_CASE("a group is named by its axes and the coordinates on the other axes", "[graphs][layout]") {
  const sg::Layout layout({.dp = 2, .tp = 2, .pp = 2});
  using enum sg::Axis;
  const auto named = [](std::string name, sg::Axes axes, std::initializer_list<int> members) {
    return sg::RankGroup{.name = std::move(name), .axes = axes, .ranks = ranks(members)};
  };
  CHECK(layout.groups(dp) == std::vector{named("dp_group_tp0_pp0", dp, {0, 2}), named("dp_group_tp1_pp0", dp, {1, 3}),
                                         named("dp_group_tp0_pp1", dp, {4, 6}), named("dp_group_tp1_pp1", dp, {5, 7})});
  CHECK(layout.groups({dp, tp}) == std::vector{named("dp_tp_group_pp0", {dp, tp}, {0, 1, 2, 3}),
                                               named("dp_tp_group_pp1", {dp, tp}, {4, 5, 6, 7})});
  CHECK(layout.group_of(sg::Rank{5}, {pp, tp}) == named("tp_pp_group_dp0", {tp, pp}, {0, 1, 4, 5}));
  CHECK(layout.groups(sg::Axes::all()) == std::vector{named("world_group", {dp, tp, pp}, {0, 1, 2, 3, 4, 5, 6, 7})});
  CHECK(layout.group_of(sg::Rank{5}, {}) == named("self_group_dp0_tp1_pp1", {}, {5}));
  CHECK(sg::to_string(layout.group_of(sg::Rank{6}, dp)) == "dp_group_tp0_pp1: 4 6");
}

TEST_CASE("every rank is in exactly one group along any set of axes", "[graphs][layout]") {
  for_random_layouts([](const sg::Layout& layout) {
    std::set<std::string> names;
    for (const sg::Axes axes : all_sets()) {
      std::vector<int> times(static_cast<std::size_t>(layout.num_ranks()));
      for (const sg::RankGroup& group : layout.groups(axes)) {
        CHECK(names.insert(group.name).second);
        CHECK(group.size() == layout.degree(axes));
        CHECK(std::is_sorted(group.ranks.begin(), group.ranks.end()));
        for (const sg::Rank rank : group.ranks) {
          ++times[static_cast<std::size_t>(sg::index(rank))];
          CHECK(layout.group_of(rank, axes) == group);
          CHECK(group.ranks[static_cast<std::size_t>(group.position(rank))] == rank);
          for (const sg::Axis axis : sg::all_axes) {
            if (!axes.contains(axis)) CHECK(layout.coord(rank)[axis] == layout.coord(group.ranks[0])[axis]);
          }
        }
      }
      CHECK(std::all_of(times.begin(), times.end(), [](int count) { return count == 1; }));
    }
  });
}

TEST_CASE("neighbours lead from heads to tails and back, and wrap around if requested", "[graphs][layout]") {
  for_random_layouts([](const sg::Layout& layout) {
    for (const sg::Axis axis : sg::all_axes) {
      CHECK(layout.heads(axis).size() == layout.groups(axis).size());
      CHECK(layout.tails(axis).size() == layout.groups(axis).size());
      for (const sg::RankGroup& group : layout.groups(axis)) {
        const auto n = group.ranks.size();
        for (std::size_t i = 0; i < n; ++i) {
          const sg::Rank rank = group.ranks[i];
          CHECK(layout.is_head(rank, axis) == (i == 0));
          CHECK(layout.is_tail(rank, axis) == (i + 1 == n));
          CHECK(layout.next(rank, axis) == (i + 1 < n ? std::optional(group.ranks[i + 1]) : std::nullopt));
          CHECK(layout.previous(rank, axis) == (i > 0 ? std::optional(group.ranks[i - 1]) : std::nullopt));
          CHECK(layout.next_wrapping(rank, axis) == group.ranks[(i + 1) % n]);
          CHECK(layout.previous_wrapping(rank, axis) == group.ranks[(i + n - 1) % n]);
        }
      }
      for (const sg::Rank rank : layout.heads(axis)) CHECK(layout.is_head(rank, axis));
      for (const sg::Rank rank : layout.tails(axis)) CHECK(layout.is_tail(rank, axis));
    }
  });
}

TEST_CASE("by default the neighbour of a rank is the next one in the pipeline", "[graphs][layout]") {
  const sg::Layout layout({.dp = 2, .pp = 3});
  CHECK(layout.next(sg::Rank{1}) == sg::Rank{3});
  CHECK(layout.previous(sg::Rank{5}) == sg::Rank{3});
  CHECK(layout.next(sg::Rank{4}) == std::nullopt);
  CHECK(layout.next_wrapping(sg::Rank{4}) == sg::Rank{0});
  CHECK(layout.previous_wrapping(sg::Rank{1}) == sg::Rank{5});
}

TEST_CASE("ranks fill nodes one after another", "[graphs][layout]") {
  const sg::Layout layout({.dp = 3, .tp = 2, .devices_per_node = 4});
  CHECK(layout.num_nodes() == 2);
  CHECK(layout.node(sg::Rank{3}) == 0);
  CHECK(layout.local_rank(sg::Rank{3}) == 3);
  CHECK(layout.node(sg::Rank{5}) == 1);
  CHECK(layout.local_rank(sg::Rank{5}) == 1);
  CHECK_THAT(sg::rank_table(layout), ContainsSubstring("rank 5  dp2 tp1 pp0  node 1 device 1\n"));
  for_random_layouts([](const sg::Layout& any) {
    for (int r = 0; r < any.num_ranks(); ++r) {
      CHECK(any.node(sg::Rank{r}) * any.spec().devices_per_node + any.local_rank(sg::Rank{r}) == r);
      CHECK(any.node(sg::Rank{r}) < any.num_nodes());
    }
    CHECK(any.node(sg::Rank{any.num_ranks() - 1}) == any.num_nodes() - 1);
  });
}

TEST_CASE("a layout's text parses back to it", "[graphs][layout]") {
  CHECK(sg::to_string(sg::LayoutSpec{.dp = 2, .tp = 4}) == "pp1-dp2-tp4");
  CHECK(sg::to_string(sg::LayoutSpec{.dp = 2, .order = "dp-tp-pp", .devices_per_node = 4, .sequence_parallel = true}) ==
        "dp2-tp1-pp1 devices_per_node=4 sequence_parallel");
  for_random_layouts([](const sg::Layout& layout) {
    CHECK(sg::parse_layout(sg::to_string(layout.spec())) == layout.spec());
    CHECK(sg::Layout(sg::parse_layout(sg::to_string(layout.spec()))) == layout);
  });
}

TEST_CASE("a layout's text with junk in it is refused", "[graphs][layout][refuses]") {
  const char* text =
      GENERATE("", "pp2", "pp2-dp2", "pp2-dp2-tp", "pp2-dp2-tp2junk", "pp2-dp2-xp2", "pp2-dp2-tp2-tp2", "pp2-dp2-tp0",
               "pp2-dp2-tp-2", "pp2-dp2-tp2 ", "pp2-dp2-tp2 devices_per_node=", "pp2-dp2-tp2 devices_per_node=4x",
               "pp2-dp2-tp2 devices_per_node=0", "pp2-dp2-tp2 sequence_parallel sequence_parallel", "pp2-dp2-tp2 order",
               "pp2-dp2-tp2 devices_per_node=4 devices_per_node=8", "pp99999999999-dp2-tp2");
  CAPTURE(text);
  CHECK_THROWS_AS(sg::parse_layout(text), sg::Error);
}

TEST_CASE("an impossible layout is refused with its numbers", "[graphs][layout][refuses]") {
  const auto says = [](const char* what) { return Message(what); };
  CHECK_THROWS_MATCHES(
      sg::Layout({.dp = 2, .tp = 2, .pp = 3}, 8), sg::Error,
      says("layout: dp(2) * tp(2) * pp(3) = 12 ranks, but the world has 8 (degrees whose product is 8)"));
  CHECK_THROWS_MATCHES(sg::Layout({.tp = 0}), sg::Error, says("layout: tp is 0 (at least 1)"));
  CHECK_THROWS_MATCHES(sg::Layout({.dp = -2, .pp = -2}, 4), sg::Error, says("layout: dp is -2 (at least 1)"));
  CHECK_THROWS_MATCHES(sg::Layout({.devices_per_node = 0}), sg::Error,
                       says("layout: devices_per_node is 0 (at least 1)"));
  CHECK_THROWS_MATCHES(sg::Layout({.order = "pp-dp"}), sg::Error,
                       says("layout: order 'pp-dp' lacks tp (dp, tp, pp once each, slowest to fastest)"));
  CHECK_THROWS_MATCHES(sg::Layout({.order = "pp-dp-tp-dp"}), sg::Error,
                       MessageMatches(ContainsSubstring("order 'pp-dp-tp-dp' has dp twice")));
  CHECK_THROWS_MATCHES(sg::Layout({.order = "pp-dp-ep"}), sg::Error,
                       MessageMatches(ContainsSubstring("has 'ep', which is not an axis")));
  CHECK_THROWS_MATCHES(sg::Layout({.dp = 65536, .tp = 65536}), sg::Error,
                       says("layout: dp(65536) * tp(65536) * pp(1) is more than 2147483647 ranks"));
  const sg::Layout layout({.dp = 2, .tp = 2});
  CHECK_THROWS_MATCHES(layout.coord(sg::Rank{4}), sg::Error, says("layout: rank 4 is not in the world (0 to 3)"));
  CHECK_THROWS_MATCHES(layout.node(sg::Rank{-1}), sg::Error, says("layout: rank -1 is not in the world (0 to 3)"));
  CHECK_THROWS_MATCHES(layout.rank({.dp = 2}), sg::Error,
                       says("layout: no rank has coordinate dp2 tp0 pp0 (dp 0 to 1)"));
  CHECK_THROWS_MATCHES(layout.group_of(sg::Rank{0}, sg::Axis::tp).position(sg::Rank{2}), sg::Error,
                       says("layout: rank 2 is not in tp_group_dp0_pp0: 0 1"));
}

TEST_CASE("a layout's groups become groups of a graph", "[graphs][layout]") {
  const sg::Layout layout({.dp = 2, .tp = 2});
  sg::Graph graph(layout.num_ranks());
  const sg::RankGroup group = layout.group_of(sg::Rank{3}, sg::Axis::dp);
  CHECK(graph.spec(sg::add_group(graph, group)) == sg::GroupSpec{.name = "dp_group_tp1_pp0", .ranks = ranks({1, 3})});
  CHECK(graph.spec(sg::add_group(graph, group, "gather")).name == "dp_group_tp1_pp0 gather");
}
