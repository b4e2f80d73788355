#pragma once
#include <functional>
#include <random>
#include <vector>

#include "graphs/schedule/search/improve.hpp"
#include "graphs/schedule/search/timer.hpp"

namespace stepgraph::search {

// Two numbers for each rank say most of a good schedule: how many activations it keeps in flight, and how many W it
// leaves waiting (build.hpp).
struct Counts {
  std::vector<int> in_flight = {}, late = {};
};
struct MakeRows {
  using Stop = std::function<bool()>;  // asked now and then
  // An empty result: the counts cannot be used, or it was stopped.
  std::function<Rows(const Counts&, const Stop&)> make = {};
  int effort                                           = 1;  // of making rows, in that of timing them
};

// Simulated annealing: one of the numbers grows or shrinks by 1 on some neighbouring ranks. The timer has the best rows
// in the end, those of `start` or better ones; if it is stopped at once, those that it had.
Counts search_counts(const Setting& setting, RowTimer& timer, const MakeRows& make, const Counts& start,
                     std::mt19937_64& random, const ImproveOptions& options);

}  // namespace stepgraph::search
