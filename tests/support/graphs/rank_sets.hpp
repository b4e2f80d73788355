#pragma once
#include <vector>

#include "engine/graph/rank_set.hpp"

namespace stepgraph::testing {

// Sets of ranks to slice by: each rank alone, every second one, all but the first, and all.
inline std::vector<RankSet> rank_sets(int num_ranks) {
  std::vector<RankSet> sets;
  std::vector<Rank> even, later;
  for (int rank = 0; rank < num_ranks; ++rank) {
    sets.emplace_back(Rank{rank});
    if (rank % 2 == 0) even.push_back(Rank{rank});
    if (rank > 0) later.push_back(Rank{rank});
  }
  if (even.size() > 1) sets.emplace_back(std::move(even));
  if (later.size() > 1) sets.emplace_back(std::move(later));
  sets.push_back(RankSet::all(num_ranks));
  return sets;
}

}  // namespace stepgraph::testing
