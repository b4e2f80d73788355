#pragma once
#include <cstdint>
#include <functional>
#include <random>

#include "graphs/schedule/search/timer.hpp"

namespace stepgraph::search {

struct ImproveOptions {
  std::int64_t most_timed    = 1'000'000;             // actions that may be timed: the work that it may cost
  double heat                = 0.03;                  // at first; in mean times of an action
  double enough              = 0;                     // a span that needs no improvement
  std::function<bool()> stop = [] { return false; };  // asked now and then
};

// Local search from the rows that the timer has, which fit the limit: leaves the best rows that it found there. Moves
// an action of a longest path to another place of its row.
void improve_rows(const Setting& setting, RowTimer& timer, std::mt19937_64& random, const ImproveOptions& options);

}  // namespace stepgraph::search
