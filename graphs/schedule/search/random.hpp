#pragma once
#include <random>

#include "graphs/schedule/search/timer.hpp"

namespace stepgraph::search {

// The same numbers with every standard library, unlike the distributions of <random>.
inline double uniform(std::mt19937_64& random) { return static_cast<double>(random() >> 11) * 0x1.0p-53; }
inline int below(std::mt19937_64& random, int end) { return static_cast<int>(uniform(random) * end); }

// What annealing makes smaller: the longest span, and a little of all of them, so that progress on one of several long
// ones counts.
inline double smooth_cost(const Setting& setting, const RowTimer& timer) {
  double sum = 0;
  for (int rank = 0; rank < setting.ranks; ++rank) sum += timer.span(rank);
  return timer.longest_span() + 0.05 * sum / setting.ranks;
}

// The mean time of an action: the unit of temperature.
inline double mean_time(const Setting& setting) {
  double sum = 0;
  for (int rank = 0; rank < setting.ranks; ++rank) sum += setting.work(rank);
  return sum / setting.ranks / setting.row_length();
}

}  // namespace stepgraph::search
