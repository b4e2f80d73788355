#include "tools/stepgraph/schedule_compare.hpp"

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <sstream>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "engine/base/words.hpp"
#include "engine/draw/dot.hpp"
#include "graphs/schedule/drawing.hpp"

namespace stepgraph::cli {

std::vector<std::string> compared_names(std::string_view list) {
  std::vector<std::string> names;
  for (const std::string_view name : split_text(list, ',')) {
    if (name.empty()) throw Error(ErrorKind::config, str("--compare '", list, "': a name is empty (1f1b,zb-h1,zb-v)"));
    if (std::find(names.begin(), names.end(), name) != names.end())
      throw Error(ErrorKind::config, str("--compare '", list, "': ", name, " is given twice (once)"));
    names.emplace_back(name);
  }
  return names;
}

std::string comparison_table(const std::vector<ScheduleResult>& results) {
  std::vector<std::vector<std::string>> lines{{"kind", "stages", "bubble rate", "makespan", "peak activation"}};
  const auto number = [](double value, int digits, bool fixed) {
    std::ostringstream out;
    if (fixed) out << std::fixed;
    out << std::setprecision(digits) << value;
    return out.str();
  };
  for (const ScheduleResult& result : results) {
    const std::vector<double>& peaks = result.timeline.peak_activation;
    lines.push_back({result.name, str(result.schedule.num_stages()), number(result.timeline.bubble_rate, 4, true),
                     number(result.timeline.makespan, 6, false),
                     number(*std::max_element(peaks.begin(), peaks.end()), 6, false)});
  }
  std::vector<std::size_t> widths(lines.front().size(), 0);
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::ostringstream out;
  for (const auto& line : lines) {
    out << std::left << std::setw(static_cast<int>(widths[0])) << line[0] << std::right;
    for (std::size_t i = 1; i < line.size(); ++i) out << "  " << std::setw(static_cast<int>(widths[i])) << line[i];
    out << '\n';
  }
  return out.str();
}

std::string title_of(const ScheduleResult& result) {
  return str(result.name, ", ", result.schedule.num_ranks(), " ranks, ", result.schedule.num_stages(), " stages, ",
             result.schedule.num_microbatches, " microbatches: bubble rate ", result.timeline.bubble_rate);
}

void write_pictures(const std::vector<ScheduleResult>& results, const Costs& costs,
                    const std::optional<std::string>& svg, const std::optional<std::string>& dot) {
  if (svg) {
    std::vector<GanttPanel> panels;
    for (const ScheduleResult& result : results) panels.push_back({result.schedule, result.timeline, title_of(result)});
    write_stream(*svg, [&](std::ostream& out) { out << gantt_svg(panels); });
  }
  if (!dot) return;
  const auto write = [&](std::ostream& out) {  // a file of Graphviz can have several graphs
    for (const ScheduleResult& result : results)
      write_dot(schedule_graph(result.schedule, {costs}).graph, out, {.title = title_of(result)});
  };
  *dot == "-" ? write(std::cout) : write_stream(*dot, write);
}

}  // namespace stepgraph::cli
