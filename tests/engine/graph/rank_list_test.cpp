#include "engine/graph/rank_list.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/graph/graph.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::Rank;
using sg::RankList;

namespace {

std::vector<Rank> all_of(const RankList& list) { return {list.begin(), list.end()}; }

}  // namespace

TEST_CASE("a mesh has the ranks of a list, and finds each of them", "[engine][ranks]") {
  const int a = GENERATE(1, 2, 3), b = GENERATE(1, 3), c = GENERATE(1, 2, 5), gap = GENERATE(1, 2);
  const int stride_c = gap, stride_b = stride_c * c + gap - 1, stride_a = stride_b * b + 7;
  CAPTURE(a, b, c, gap);
  std::vector<Rank> ranks;
  for (int i = 0; i < a; ++i) {
    for (int j = 0; j < b; ++j) {
      for (int k = 0; k < c; ++k) ranks.push_back(Rank{3 + i * stride_a + j * stride_b + k * stride_c});
    }
  }
  const RankList mesh = RankList::mesh(Rank{3}, {{a, stride_a}, {b, stride_b}, {c, stride_c}}), list(ranks);
  CHECK(mesh.is_mesh());
  CHECK(all_of(mesh) == ranks);
  CHECK(all_of(list) == ranks);
  CHECK(mesh == list);
  CHECK_FALSE(mesh < list);
  CHECK(mesh.size() == ranks.size());
  CHECK(mesh.front() == ranks.front());
  CHECK(mesh.back() == ranks.back());
  for (int rank = 0; rank < index(ranks.back()) + 3; ++rank) {
    const auto at = std::find(ranks.begin(), ranks.end(), Rank{rank});
    const auto expected =
        at == ranks.end() ? std::nullopt : std::optional(static_cast<std::size_t>(at - ranks.begin()));
    CHECK(mesh.find(Rank{rank}) == expected);
    CHECK(list.find(Rank{rank}) == expected);
  }
}

TEST_CASE("lists keep their order, and compare by their ranks", "[engine][ranks]") {
  const RankList back{Rank{4}, Rank{2}, Rank{3}};
  CHECK_FALSE(back.is_mesh());
  CHECK(back.find(Rank{3}) == 2);
  CHECK_FALSE(back.contains(Rank{5}));
  CHECK(back != RankList{Rank{2}, Rank{3}, Rank{4}});
  CHECK(RankList{Rank{2}, Rank{3}} < RankList{Rank{2}, Rank{4}});
  CHECK(RankList{Rank{1}}.is_mesh());
  CHECK(RankList().empty());
  CHECK_FALSE(RankList().contains(Rank{0}));
  CHECK(all_of(RankList{Rank{0}, Rank{2}, Rank{4}}) == std::vector{Rank{0}, Rank{2}, Rank{4}});
}

TEST_CASE("axes that do not nest are refused", "[engine][ranks][refuses]") {
  CHECK_THROWS_WITH(RankList::mesh(Rank{0}, {{2, 2}, {3, 1}}), ContainsSubstring("faster axes reach 2 ranks far"));
  CHECK_THROWS_WITH(RankList::mesh(Rank{0}, {{2, 0}}), ContainsSubstring("2 ranks at distances of 0"));
  CHECK_THROWS_WITH(RankList::mesh(Rank{0}, {{0, 1}}), ContainsSubstring("an axis of 0"));
  sg::Graph graph(4);
  CHECK_THROWS_WITH(graph.group({.name = "g", .ranks = RankList::mesh(Rank{1}, {{2, 3}})}),
                    ContainsSubstring("rank 4 is not in the world"));
  CHECK_THROWS_WITH(graph.group({.name = "g", .ranks = {Rank{1}, Rank{0}, Rank{1}}}),
                    ContainsSubstring("rank 1 is a member twice"));
}
