#pragma once
#include <random>

#include "graphs/schedule/search/rows.hpp"

namespace stepgraph::testing {

[[nodiscard]] inline int draw(std::mt19937_64& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

// One placement of a search, with costs by stage. Times are multiples of a quarter, so that sums are exact in any
// order.
[[nodiscard]] search::Setting random_setting(std::mt19937_64& random, int max_ranks, int max_microbatches,
                                             int max_chunks);

}  // namespace stepgraph::testing
