#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "graphs/schedule/simulation.hpp"
#include "graphs/schedule/validate.hpp"

// What `stepgraph schedule` prints and draws.
namespace stepgraph::cli {

// A schedule that was made, checked and simulated.
struct ScheduleResult {
  std::string name;  // of its kind, or of its file
  bool is_file = false;
  PipelineSchedule schedule;
  ScheduleFacts facts;
  ScheduleTimeline timeline;
  // Of a searched schedule:
  struct Search {
    double lower_bound = 0;  // of the bubble rate
    double limit       = 0;  // 0: none
    std::string how;
    std::string chunks;  // those that were searched: "one chunk"
    std::int64_t seed = 0;
    bool out_of_time  = false;
  };
  std::optional<Search> search = {};
};

// What was asked for.
struct ScheduleRequest {
  std::vector<Costs> costs = {};
  std::string costs_text   = {};  // as they were given
  double retain            = 1;
};

// A timeline and its figures.
void print_text(const ScheduleRequest& request, const ScheduleResult& result);
void print_json(const ScheduleRequest& request, const ScheduleResult& result);

// A line for each schedule: bubble rate, makespan and highest peak of activations, as "4 > 3" where that is above the
// limit of a searched one; of searched ones the lower bound, and how far the rate is above it.
[[nodiscard]] std::string comparison_table(const std::vector<ScheduleResult>& results);

// "zb-v, 4 stages, 8 microbatches: bubble rate 0"
[[nodiscard]] std::string title_of(const ScheduleResult& result);

// A picture of all of them under one axis, and their graphs. `costs` are those that they were simulated with.
void write_pictures(const std::vector<ScheduleResult>& results, const std::vector<Costs>& costs,
                    const std::optional<std::string>& svg, const std::optional<std::string>& dot);

}  // namespace stepgraph::cli
