#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "graphs/schedule/graph.hpp"
#include "graphs/schedule/schedule.hpp"

namespace stepgraph {

// Stages of each rank. `two`: stages r and P + r, or r and 2P - 1 - r, on rank r. `any`: both numbers.
enum class SearchChunks : std::uint8_t { one, two, any };

struct SearchProgress {
  double elapsed_s        = 0;
  double bubble_rate      = 1;  // of the best schedule so far
  double lower_bound_rate = 0;
  std::string doing       = {};  // "two chunks in V placement: moves"; of the result "found by counts, moves"
  bool is_result          = false;
};

struct ScheduleSearch {
  int ranks = 1, microbatches = 1;
  SearchChunks chunks      = SearchChunks::one;
  std::vector<Costs> costs = {Costs{}};  // one for all ranks, one for each rank, or one for each stage
  double retain            = 1;          // the share of activations that W needs, as ScheduleCosts has it
  double limit             = 0;          // of a rank's activations, in microbatches of a rank; 0: none
  // The number of trials follows from the budget and the size of the schedule, not from the clock. They take less than
  // the budget on usual machines; the clock ends the search where they do not.
  double budget_s    = 60;
  bool by_clock      = true;  // false: trials alone end it, so the result never differs
  std::uint64_t seed = 0;
  std::function<void(const SearchProgress&)> on_progress = {};  // about ten times a second, and in the end
};

struct FoundSchedule {
  PipelineSchedule schedule = {};
  double bubble_rate        = 0;
  double makespan           = 0;
  double longest_span       = 0;
  // No schedule within the limit has a lower rate, with the chunks and in the placements that are searched: proved.
  double lower_bound_rate             = 0;
  std::vector<double> peak_activation = {};
  std::string how                     = {};     // a kind, or the steps of the search: "counts, moves"
  bool out_of_time                    = false;  // the clock cut it short: another run may give another schedule
};

// The schedule with the shortest longest span that is found within the limit; so it has the least bubble rate. Unless
// it is out of time, no ScheduleKind that fits the limit, in the searched placements, has a shorter one. Spans that
// differ by a relative 1e-12 or less count as equal, since they are rounded sums. The same search gives the same
// schedule on the same kind of machine, unless it is out of time. W are in microbatch order. With costs for each stage,
// only placements with that many stages are searched. Their busiest ranks can have different work, so there a longer
// schedule can have a lower rate; the shorter one is still the better one.
//
// Throws Error(config) if the search has invalid numbers, a limit below 1 (a microbatch that runs through all stages
// and back holds 1), or more than 65,535 microbatches.
[[nodiscard]] FoundSchedule search_schedule(const ScheduleSearch& search);
// Refuses what search_schedule refuses, without a search. It does not look at the costs.
void check_search(const ScheduleSearch& search);

}  // namespace stepgraph
