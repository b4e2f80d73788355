#pragma once
#include <span>
#include <string>
#include <string_view>

#include "graphs/schedule/schedule.hpp"
#include "graphs/schedule/simulation.hpp"

namespace stepgraph {

struct GanttOptions {
  int columns = 120;    // at most as many letters for the time axis (at least 10)
  bool color  = false;  // ANSI colours, for terminals
};

// A line for each rank, time from left to right. A compute action is its name ("F0"; with several stages to a rank
// "4F0") and dashes for as long as it takes, or just its letter where the name does not fit; a dot is idle time. Where
// an action is narrower than a column, the column shows what runs at its middle.
[[nodiscard]] std::string gantt_text(const PipelineSchedule& schedule, const ScheduleTimeline& timeline,
                                     const GanttOptions& options = {});

// The same as a picture, with a time axis; every action has a tooltip.
[[nodiscard]] std::string gantt_svg(const PipelineSchedule& schedule, const ScheduleTimeline& timeline,
                                    std::string_view title);

// Several schedules in one picture, one above the other, under one time axis.
struct GanttPanel {
  const PipelineSchedule& schedule;
  const ScheduleTimeline& timeline;
  std::string title;
};
[[nodiscard]] std::string gantt_svg(std::span<const GanttPanel> panels);

}  // namespace stepgraph
