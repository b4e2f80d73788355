#include "graphs/schedule/drawing.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "engine/base/error.hpp"
#include "engine/base/text.hpp"

namespace stepgraph {
namespace {

struct Style {
  const char* terminal;  // ANSI: background, then black letters
  const char* fill;      // SVG
};

Style style_of(ActionKind kind) {
  switch (kind) {
    case ActionKind::forward:
      return {"\x1b[48;5;111;30m", "#8ab4f8"};
    case ActionKind::input_gradient:
      return {"\x1b[48;5;215;30m", "#f6ae5c"};
    case ActionKind::weight_gradient:
      return {"\x1b[48;5;114;30m", "#81c995"};
    default:
      return {"\x1b[48;5;180;30m", "#dcb67a"};
  }
}

std::string label_of(const Action& action, bool with_stage) {
  return with_stage ? to_string(action) : str(to_string(action.kind), index(action.microbatch));
}

bool several_stages(const PipelineSchedule& schedule) {
  const std::vector<int> stages = schedule.stages_per_rank();
  return std::any_of(stages.begin(), stages.end(), [](int count) { return count > 1; });
}

// Visits compute actions that take time.
template <class Visit>
void for_each_bar(const PipelineSchedule& schedule, const ScheduleTimeline& timeline, std::size_t rank,
                  const Visit& visit) {
  for (std::size_t i = 0; i < schedule.rows[rank].size(); ++i) {
    const NodeTime& time = timeline.rows[rank][i];
    if (is_compute(schedule.rows[rank][i].kind) && time.end_s > time.begin_s) visit(schedule.rows[rank][i], time);
  }
}

// Columns to a unit of time: as many as there are, but no more than the shortest action needs for its name. Where all
// actions take multiples of the shortest, in whole columns, so that equal actions look equal.
double scale_of(const PipelineSchedule& schedule, const ScheduleTimeline& timeline, int columns) {
  double shortest     = timeline.makespan;
  std::size_t letters = 1;
  const bool stages   = several_stages(schedule);
  const auto for_all  = [&](const auto& visit) {
    for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank) for_each_bar(schedule, timeline, rank, visit);
  };
  for_all([&](const Action& action, const NodeTime& time) {
    shortest = std::min(shortest, time.end_s - time.begin_s);
    letters  = std::max(letters, label_of(action, stages).size() + 1);
  });
  bool multiples = true;
  for_all([&](const Action&, const NodeTime& time) {
    const double times = (time.end_s - time.begin_s) / shortest;
    multiples &= std::abs(times - std::round(times)) < 1e-6 * times;
  });
  const double most = std::min(columns * shortest / timeline.makespan * (1 + 1e-9), static_cast<double>(letters));
  return (multiples && most >= 1 ? std::floor(most) : most) / shortest;
}

std::string bar_text(const std::string& label, std::size_t width, bool color) {
  // A name that does not fit is its letter, once.
  std::string text = width < label.size() ? std::string(1, label[label.find_first_not_of("0123456789")]) : label;
  text.resize(width, color ? ' ' : '-');
  if (!color && width > label.size()) text.back() = ' ';
  return text;
}

// Short, and without noise in the last digits.
std::string number(double value) {
  std::ostringstream out;
  out.precision(6);
  out << value;
  return out.str();
}

}  // namespace

std::string gantt_text(const PipelineSchedule& schedule, const ScheduleTimeline& timeline,
                       const GanttOptions& options) {
  if (options.columns < 10)
    throw Error(ErrorKind::config, str("schedule: a drawing of ", options.columns, " columns (at least 10)"));
  const double scale       = scale_of(schedule, timeline, options.columns);
  const auto columns       = static_cast<std::size_t>(std::max(1L, std::lround(timeline.makespan * scale)));
  const bool stages        = several_stages(schedule);
  const std::size_t digits = str(schedule.num_ranks() - 1).size();
  const std::string name   = "rank ";
  std::string text;
  bool skipped = false;
  for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    std::string head = str(rank);
    head.insert(0, digits - head.size(), ' ');
    text += str(name, head, "  ");
    std::size_t drawn = 0;  // columns
    for_each_bar(schedule, timeline, rank, [&](const Action& action, const NodeTime& time) {
      // Columns whose middle lies in the action.
      const auto begin = static_cast<std::size_t>(std::max(0.0, std::ceil(time.begin_s * scale - 0.5 - 1e-9)));
      const auto end =
          std::min(columns, static_cast<std::size_t>(std::max(0.0, std::ceil(time.end_s * scale - 0.5 - 1e-9))));
      if (end <= std::max(begin, drawn)) {
        skipped = true;
        return;
      }
      text.append(begin - std::min(begin, drawn), '.');
      const std::string bar = bar_text(label_of(action, stages), end - std::max(begin, drawn), options.color);
      text += options.color ? str(style_of(action.kind).terminal, bar, "\x1b[0m") : bar;
      drawn = end;
    });
    text.append(columns - drawn, '.');
    while (!options.color && text.back() == ' ') text.pop_back();
    text += '\n';
  }
  if (skipped) text += str("(a column is ", number(1 / scale), " long: some actions are too short to be drawn)\n");
  return text;
}

namespace {

constexpr double row_height = 26, bar_height = 22, axis_left = 64, title_height = 34;

void draw_panel(std::ostream& out, const GanttPanel& panel, double top, double scale) {
  const auto& [schedule, timeline, title] = panel;
  const bool stages                       = several_stages(schedule);
  out << "<text x=\"" << axis_left << "\" y=\"" << top + 20 << "\" font-size=\"13\">" << escaped(title) << "</text>\n";
  for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    const double y = top + title_height + row_height * static_cast<double>(rank);
    out << "<text x=\"8\" y=\"" << y + 15 << "\">rank " << rank << "</text>\n<rect x=\"" << axis_left << "\" y=\"" << y
        << "\" width=\"" << timeline.makespan * scale << "\" height=\"" << bar_height << "\" fill=\"#eeeeee\"/>\n";
    for_each_bar(schedule, timeline, rank, [&](const Action& action, const NodeTime& time) {
      const double x = axis_left + time.begin_s * scale, bar = (time.end_s - time.begin_s) * scale;
      const std::string label = label_of(action, stages);
      out << "<g><title>" << to_string(action) << ": " << number(time.begin_s) << " to " << number(time.end_s)
          << "</title><rect x=\"" << x << "\" y=\"" << y << "\" width=\"" << bar << "\" height=\"" << bar_height
          << "\" fill=\"" << style_of(action.kind).fill << "\" stroke=\"white\"/>";
      if (bar >= 7 * static_cast<double>(label.size()))
        out << "<text x=\"" << x + bar / 2 << "\" y=\"" << y + 15 << "\" text-anchor=\"middle\">" << label << "</text>";
      out << "</g>\n";
    });
  }
}

// Ticks at 1, 2 or 5 times a power of ten, about ten of them.
void draw_axis(std::ostream& out, double makespan, double y, double scale) {
  double step = std::pow(10, std::floor(std::log10(makespan / 10)));
  for (const double factor : {2.0, 2.5, 2.0}) {
    if (makespan / step > 12) step *= factor;
  }
  for (int tick = 0; tick * step <= makespan * (1 + 1e-9); ++tick) {
    const double time = tick * step, x = axis_left + time * scale;
    out << "<path d=\"M" << x << ' ' << y << "v5\" stroke=\"black\"/><text x=\"" << x << "\" y=\"" << y + 18
        << "\" text-anchor=\"middle\">" << number(time) << "</text>\n";
  }
}

}  // namespace

std::string gantt_svg(std::span<const GanttPanel> panels) {
  if (panels.empty()) throw Error(ErrorKind::config, "schedule: a drawing of no schedule (at least 1)");
  double makespan = 0, finest = 0, axis = 0;
  for (const GanttPanel& panel : panels) {
    makespan = std::max(makespan, panel.timeline.makespan);
    finest   = std::max(finest, scale_of(panel.schedule, panel.timeline, 1 << 20));
    axis += title_height + row_height * panel.schedule.num_ranks();
  }
  // A name needs about 7 units a letter; the picture scales, so only its proportions matter.
  const double scale = std::clamp(finest * 8, 600 / makespan, 20000 / makespan);
  const double width = axis_left + makespan * scale + 20, height = axis + 40;
  std::ostringstream out;
  out.precision(8);
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << width << ' ' << height
      << "\" font-family=\"sans-serif\" font-size=\"11\">\n<!-- stepgraph -->\n<rect width=\"100%\" height=\"100%\" "
         "fill=\"white\"/>\n";
  double top = 0;
  for (const GanttPanel& panel : panels) {
    draw_panel(out, panel, top, scale);
    top += title_height + row_height * panel.schedule.num_ranks();
  }
  draw_axis(out, makespan, axis, scale);
  out << "</svg>\n";
  return out.str();
}

std::string gantt_svg(const PipelineSchedule& schedule, const ScheduleTimeline& timeline, std::string_view title) {
  const GanttPanel panel{schedule, timeline, std::string(title)};
  return gantt_svg({&panel, 1});
}

}  // namespace stepgraph
