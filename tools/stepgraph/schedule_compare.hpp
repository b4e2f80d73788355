#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "graphs/schedule/simulation.hpp"
#include "graphs/schedule/validate.hpp"

// Schedules side by side: stepgraph schedule --compare.
namespace stepgraph::cli {

// A schedule that was made, checked and simulated.
struct ScheduleResult {
  std::string name;  // of its kind, or of its file
  PipelineSchedule schedule;
  ScheduleFacts facts;
  ScheduleTimeline timeline;
  // Of a searched schedule:
  struct Search {
    double lower_bound = 0;  // of the bubble rate
    double limit       = 0;  // 0: none
    std::string how;
    bool out_of_time = false;
  };
  std::optional<Search> search = {};
};

// The names in "1f1b,zb-h1". Throws Error(config) where one is empty or given twice.
[[nodiscard]] std::vector<std::string> compared_names(std::string_view list);

// A line for each schedule: bubble rate, makespan and highest peak of activations.
[[nodiscard]] std::string comparison_table(const std::vector<ScheduleResult>& results);

// "zb-v, 4 stages, 8 microbatches: bubble rate 0"
[[nodiscard]] std::string title_of(const ScheduleResult& result);

// A picture of all of them under one axis, and their graphs. `costs` are those that they were simulated with.
void write_pictures(const std::vector<ScheduleResult>& results, const Costs& costs,
                    const std::optional<std::string>& svg, const std::optional<std::string>& dot);

}  // namespace stepgraph::cli
