#include "engine/graph/rank_set.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "engine/graph/graph.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::Rank;
using sg::RankSet;

TEST_CASE("a set of ranks is ascending and knows the place of each", "[engine][ranks]") {
  const RankSet some(std::vector{Rank{5}, Rank{0}, Rank{2}});
  CHECK(some.size() == 3);
  CHECK(std::vector<Rank>(some.begin(), some.end()) == std::vector{Rank{0}, Rank{2}, Rank{5}});
  CHECK(some.place(Rank{2}) == 1);
  CHECK_FALSE(some.place(Rank{1}));
  CHECK_FALSE(some.contains(Rank{6}));
  CHECK(some.num_in(std::vector{Rank{5}, Rank{1}, Rank{0}}) == 2);

  const RankSet all = RankSet::all(4);
  CHECK(all.size() == 4);
  CHECK(all.place(Rank{3}) == 3);
  CHECK_FALSE(all.contains(Rank{4}));
  CHECK_FALSE(all.contains(Rank{-1}));
  CHECK(all == RankSet(std::vector{Rank{0}, Rank{1}, Rank{2}, Rank{3}}));
  CHECK(all != RankSet::all(3));
  CHECK(all.contains(RankSet(Rank{2})));
  CHECK_FALSE(RankSet(Rank{2}).contains(all));
  CHECK_FALSE(all.contains(some));
}

TEST_CASE("sets of ranks are named in messages", "[engine][ranks]") {
  CHECK(to_string(RankSet(Rank{3})) == "rank 3");
  CHECK(to_string(RankSet(std::vector{Rank{0}, Rank{2}})) == "ranks 0 and 2");
  CHECK(to_string(RankSet(std::vector{Rank{0}, Rank{2}, Rank{5}})) == "ranks 0, 2 and 5");
  CHECK(to_string(RankSet::all(8)) == "ranks 0 to 7");
  std::vector<Rank> even;
  for (int rank = 0; rank < 24; rank += 2) even.push_back(Rank{rank});
  CHECK(to_string(RankSet(even)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 4 more");
}

TEST_CASE("impossible sets of ranks are refused", "[engine][ranks][refuses]") {
  CHECK_THROWS_WITH(RankSet(std::vector<Rank>{}), ContainsSubstring("none are given"));
  CHECK_THROWS_WITH(RankSet(std::vector{Rank{1}, Rank{1}}), ContainsSubstring("rank 1 is given twice"));
  CHECK_THROWS_WITH(RankSet(std::vector{Rank{-1}, Rank{1}}), ContainsSubstring("-1"));
  CHECK_THROWS_WITH(sg::Graph(4, RankSet(std::vector{Rank{1}, Rank{4}})),
                    ContainsSubstring("rank 4 is not in the world"));
  sg::Graph graph(4, RankSet(std::vector{Rank{1}, Rank{3}}));
  CHECK_THROWS_WITH(graph.lane(Rank{2}, sg::LaneKind::compute), ContainsSubstring("holds only ranks 1 and 3"));
  CHECK(graph.lane_size({Rank{2}, sg::LaneKind::compute}) == 0);
}
