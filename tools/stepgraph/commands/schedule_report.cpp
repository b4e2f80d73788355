#include "tools/stepgraph/commands/schedule_report.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <string_view>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "engine/base/text.hpp"
#include "engine/draw/dot.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/schedule/drawing.hpp"

namespace stepgraph::cli {
namespace {

// Colours only on a terminal, and not if NO_COLOR is set (no-color.org).
bool wants_color() {
  const char* terminal = std::getenv("TERM");
  return isatty(STDOUT_FILENO) == 1 && !std::getenv("NO_COLOR") && terminal && std::string_view(terminal) != "dumb";
}

int terminal_columns() {
  winsize size{};
  return isatty(STDOUT_FILENO) == 1 && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 24
             ? size.ws_col - 10
             : 120;
}

// One cost is an object; several are a list.
JsonValue json_costs(const std::vector<Costs>& costs) {
  const auto of = [](const Costs& cost) -> JsonValue {
    return {{"F", cost.F}, {"I", cost.I}, {"W", cost.W}, {"COMM", cost.COMM}};
  };
  if (costs.size() == 1) return of(costs.front());
  std::vector<JsonValue> list;
  for (const Costs& cost : costs) list.push_back(of(cost));
  return list;
}

}  // namespace

void print_text(const ScheduleRequest& request, const ScheduleResult& result) {
  const auto& [name, is_file, schedule, facts, timeline, search] = result;
  const auto count = [](int number, const char* what) { return str(number, " ", what, number == 1 ? "" : "s"); };
  std::cout << name << ": " << count(schedule.num_ranks(), "rank") << ", " << count(schedule.num_stages(), "stage")
            << ", " << count(schedule.num_microbatches, schedule.num_microbatches == 1 ? "microbatch" : "microbatche")
            << "; costs F,I,W,COMM " << request.costs_text;
  if (request.retain != 1) std::cout << ", retain " << request.retain;
  if (search && search->limit > 0) std::cout << ", limit " << search->limit;
  std::cout << "\n"
            << gantt_text(schedule, timeline, {.columns = terminal_columns(), .color = wants_color()})
            << "bubble rate     " << std::fixed << std::setprecision(4) << timeline.bubble_rate;
  if (search) {
    std::cout << "\nlower bound     " << search->lower_bound << " (proved for " << search->chunks << "; the rate is "
              << timeline.bubble_rate - search->lower_bound << " above it)\nfound by        " << search->how
              << (search->out_of_time ? "; cut short by the time budget" : "");
  }
  std::cout << std::defaultfloat << std::setprecision(6) << "\nmakespan        " << timeline.makespan
            << " (longest span of a rank " << timeline.longest_span << ")\npeak activation";
  for (const double peak : timeline.peak_activation) std::cout << ' ' << peak;
  std::cout << "\nvalid; weight gradients are " << (facts.weights_in_order ? "" : "not ") << "in microbatch order\n";
}

void print_json(const ScheduleRequest& request, const ScheduleResult& result) {
  const auto& [name, is_file, schedule, facts, timeline, search] = result;
  const std::vector<int> chunks                                  = schedule.stages_per_rank();
  JsonValue line = {{"type", "schedule"}, {"kind", is_file ? "csv" : name}};
  if (is_file) line.set("file", name);
  line.add({
      {"stages", schedule.num_ranks()},
      {"microbatches", schedule.num_microbatches},
      {"chunks", *std::max_element(chunks.begin(), chunks.end())},
      {"total_stages", schedule.num_stages()},
      {"costs", json_costs(request.costs)},
      {"retain", request.retain},
      {"bubble_rate", timeline.bubble_rate},
      {"makespan", timeline.makespan},
      {"longest_span", timeline.longest_span},
      {"peak_activation", timeline.peak_activation},
      {"valid", true},
      {"weights_in_order", facts.weights_in_order},
  });
  if (search) {
    line.add({{"lower_bound", search->lower_bound},
              {"distance", timeline.bubble_rate - search->lower_bound},
              {"how", search->how},
              {"limit", search->limit},
              {"seed", search->seed},
              {"out_of_time", search->out_of_time}});
  }
  std::cout << json_line(line) << "\n";
}

std::string comparison_table(const std::vector<ScheduleResult>& results) {
  std::vector<std::vector<std::string>> lines{{"kind", "stages", "bubble rate", "makespan", "peak activation"}};
  const auto number = [](double value, int digits, bool fixed) {
    std::ostringstream out;
    if (fixed) out << std::fixed;
    out << std::setprecision(digits) << value;
    return out.str();
  };
  const auto found    = std::find_if(results.begin(), results.end(), [](const auto& result) { return result.search; });
  const bool searched = found != results.end();
  const double limit  = searched ? found->search->limit : 0;
  if (searched) lines.front().insert(lines.front().end(), {"lower bound", "above it"});
  for (const ScheduleResult& result : results) {
    const std::vector<double>& peaks = result.timeline.peak_activation;
    const double peak                = *std::max_element(peaks.begin(), peaks.end());
    const bool is_over               = limit > 0 && peak > limit * (1 + 1e-12);
    lines.push_back({result.name, str(result.schedule.num_stages()), number(result.timeline.bubble_rate, 4, true),
                     number(result.timeline.makespan, 6, false),
                     number(peak, 6, false) + (is_over ? " > " + number(limit, 6, false) : "")});
    if (!searched) continue;
    const bool has_bound = result.search.has_value();
    const double bound   = has_bound ? result.search->lower_bound : 0;
    lines.back().push_back(has_bound ? number(bound, 4, true) : "");
    lines.back().push_back(has_bound ? number(result.timeline.bubble_rate - bound, 4, true) : "");
  }
  return table_text(lines);
}

std::string title_of(const ScheduleResult& result) {
  return str(result.name, ", ", result.schedule.num_ranks(), " ranks, ", result.schedule.num_stages(), " stages, ",
             result.schedule.num_microbatches, " microbatches: bubble rate ", result.timeline.bubble_rate);
}

void write_pictures(const std::vector<ScheduleResult>& results, const std::vector<Costs>& costs,
                    const std::optional<std::string>& svg, const std::optional<std::string>& dot) {
  if (svg) {
    std::vector<GanttPanel> panels;
    for (const ScheduleResult& result : results) panels.push_back({result.schedule, result.timeline, title_of(result)});
    write_stream(*svg, [&](std::ostream& out) { out << gantt_svg(panels); });
  }
  if (!dot) return;
  const auto write = [&](std::ostream& out) {  // a file of Graphviz can have several graphs
    for (const ScheduleResult& result : results)
      write_dot(schedule_graph(result.schedule, costs).graph, out, {.title = title_of(result)});
  };
  *dot == "-" ? write(std::cout) : write_stream(*dot, write);
}

}  // namespace stepgraph::cli
