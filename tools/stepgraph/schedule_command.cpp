#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <memory>
#include <optional>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/schedule/csv.hpp"
#include "graphs/schedule/drawing.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/simulation.hpp"
#include "graphs/schedule/validate.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/targets.hpp"

namespace stepgraph::cli {
namespace {

struct ScheduleOptions {
  std::optional<std::string> kind, from;
  std::optional<int> stages, microbatches, chunks;
  std::string costs = "1,1,1,0";
  std::optional<double> limit;
  double retain = 1;
  std::optional<std::string> svg, csv;
  bool json = false, force = false;
};

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::config, message); }

Costs parse_costs(const std::string& text) {
  Costs costs;
  std::string_view rest = text;
  for (double* time : {&costs.F, &costs.I, &costs.W, &costs.COMM}) {
    const bool last            = time == &costs.COMM;
    const std::size_t length   = std::min(rest.find(','), rest.size());
    const std::string_view one = rest.substr(0, length);
    const auto [end, error]    = std::from_chars(one.data(), one.data() + one.size(), *time);
    if (error != std::errc{} || end != one.data() + one.size() || !(*time >= 0) || !std::isfinite(*time) ||
        last != (length == rest.size())) {
      refuse(str("--costs '", text, "': four numbers, none negative (F,I,W,COMM: 1,1,1,0.1)"));
    }
    *time += 0.0;  // no -0
    rest.remove_prefix(std::min(length + 1, rest.size()));
  }
  if (!(costs.F + costs.I + costs.W > 0))
    refuse(str("--costs '", text, "': F, I and W are all 0 (at least one above 0)"));
  return costs;
}

// A schedule has a kind and its numbers, or a file.
void check_source(const ScheduleOptions& options) {
  const auto check = [](std::string_view name, bool given, bool wanted, std::string_view why) {
    if (given != wanted) refuse(str(name, given ? ": cannot be combined with --from" : ": missing", " (", why, ")"));
  };
  const bool has_kind = !options.from;
  check("--kind", options.kind.has_value(), has_kind,
        has_kind ? "the name of an order, or --from FILE.csv" : "the file has the order");
  check("--stages", options.stages.has_value(), has_kind,
        has_kind ? "the number of pipeline ranks" : "the file has a row for each rank");
  check("--microbatches", options.microbatches.has_value(), has_kind,
        has_kind ? "the number of microbatches" : "the file has the microbatches");
  if (options.from) check("--chunks", options.chunks.has_value(), false, "the file says which rank has which stages");
}

PipelineSchedule make_schedule(const ScheduleOptions& options) {
  if (options.from) return read_csv(*options.from);
  return pipeline_schedule(
      parse_schedule_kind(*options.kind),
      {.ranks = *options.stages, .microbatches = *options.microbatches, .chunks = options.chunks.value_or(1)});
}

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

void print_text(const ScheduleOptions& options, const PipelineSchedule& schedule, const ScheduleFacts& facts,
                const ScheduleTimeline& timeline) {
  const auto count = [](int number, const char* what) { return str(number, " ", what, number == 1 ? "" : "s"); };
  std::cout << (options.from ? *options.from : *options.kind) << ": " << count(schedule.num_ranks(), "rank") << ", "
            << count(schedule.num_stages(), "stage") << ", "
            << count(schedule.num_microbatches, schedule.num_microbatches == 1 ? "microbatch" : "microbatche")
            << "; costs F,I,W,COMM " << options.costs;
  if (options.retain != 1) std::cout << ", retain " << options.retain;
  std::cout << "\n"
            << gantt_text(schedule, timeline, {.columns = terminal_columns(), .color = wants_color()})
            << "bubble rate     " << std::fixed << std::setprecision(4) << timeline.bubble_rate << std::defaultfloat
            << std::setprecision(6) << "\nmakespan        " << timeline.makespan << " (longest span of a rank "
            << timeline.longest_span << ")\npeak activation";
  for (const double peak : timeline.peak_activation) std::cout << ' ' << peak;
  std::cout << "\nvalid; weight gradients are " << (facts.weights_in_order ? "" : "not ") << "in microbatch order\n";
}

void print_json(const ScheduleOptions& options, const PipelineSchedule& schedule, const Costs& costs,
                const ScheduleFacts& facts, const ScheduleTimeline& timeline) {
  const std::vector<int> chunks = schedule.stages_per_rank();
  JsonValue line                = {{"type", "schedule"}, {"kind", options.from ? "csv" : *options.kind}};
  if (options.from) line.set("file", *options.from);
  line.add({
      {"stages", schedule.num_ranks()},
      {"microbatches", schedule.num_microbatches},
      {"chunks", *std::max_element(chunks.begin(), chunks.end())},
      {"total_stages", schedule.num_stages()},
      {"costs", {{"F", costs.F}, {"I", costs.I}, {"W", costs.W}, {"COMM", costs.COMM}}},
      {"retain", options.retain},
      {"bubble_rate", timeline.bubble_rate},
      {"makespan", timeline.makespan},
      {"longest_span", timeline.longest_span},
      {"peak_activation", timeline.peak_activation},
      {"valid", true},
      {"weights_in_order", facts.weights_in_order},
  });
  std::cout << json_line(line) << "\n";
}

void run_schedule(const ScheduleOptions& options) {
  if (options.kind) static_cast<void>(parse_schedule_kind(*options.kind));  // throws for an unknown name
  check_source(options);
  if (options.limit)
    refuse(str("--limit ", *options.limit, ": ", options.from ? *options.from : *options.kind,
               " has a fixed order (a limit is only for searched orders)"));
  if (options.svg == "-") refuse("--svg -: stdout is not supported (a file name)");
  if (options.svg && options.svg == options.csv)
    refuse(str("--svg and --csv: both write ", *options.svg, " (two files)"));
  if (options.json && options.csv == "-") refuse("--json and --csv -: both write to stdout (--csv FILE)");
  check_target("--svg", options.svg, FileKind::svg, options.force);
  if (options.csv != "-") check_target("--csv", options.csv, FileKind::csv, options.force);
  const Costs costs               = parse_costs(options.costs);
  const PipelineSchedule schedule = make_schedule(options);
  const ScheduleFacts facts       = validate(schedule);
  const ScheduleTimeline timeline = simulate(schedule, {.costs = {costs}, .retain = options.retain});
  if (options.svg) {
    const std::string title = str(options.from ? *options.from : *options.kind, ", ", schedule.num_ranks(), " stages, ",
                                  schedule.num_microbatches, " microbatches: bubble rate ", timeline.bubble_rate);
    write_stream(*options.svg, [&](std::ostream& out) { out << gantt_svg(schedule, timeline, title); });
  }
  if (options.csv == "-") return write_csv(schedule, std::cout);
  if (options.csv) write_stream(*options.csv, [&](std::ostream& out) { write_csv(schedule, out); });
  options.json ? print_json(options, schedule, costs, facts, timeline) : print_text(options, schedule, facts, timeline);
}

}  // namespace

void add_schedule(Command program) {
  Command command = program.subcommand(
      "schedule", "Build, check and simulate a pipeline schedule: timeline, bubble rate, activation memory");
  auto options = std::make_shared<ScheduleOptions>();
  command.option("--kind", options->kind,
                 "Order of the actions: round-robin, sequential, gpipe, 1f1b, interleaved, zb-h1 or zb-h2. Needed "
                 "without --from");
  command.option("--stages", options->stages, "Pipeline ranks (P). Needed without --from").between(1, 1 << 20);
  command.option("--microbatches", options->microbatches, "Microbatches (M). Needed without --from")
      .between(1, 1 << 24);
  command.option("--chunks", options->chunks, "Stages of each rank (V), 1 unless given; there are P*V stages")
      .between(1, 1 << 20);
  command.option(
      "--from", options->from,
      "Instead of --kind, --stages and --microbatches: read the schedule from a CSV file, as --csv writes it");
  command.option(
      "--costs", options->costs,
      "F,I,W,COMM: the times of forward, input gradient and weight gradient for one microbatch on one rank, and "
      "of one transfer. A chunk takes 1/V of the first three");
  command
      .option("--limit", options->limit,
              "Limit of the activations of a rank, in microbatches; only for searched orders")
      .hidden();  // no kind uses it yet
  command.option("--retain", options->retain, "Share of the activations that is kept from the end of I to the end of W")
      .between(0.0, 1.0);
  command.option("--svg", options->svg, "Draw the timeline to an SVG file");
  command.option(
      "--csv", options->csv,
      "Write the schedule to a file in the format of torch.distributed.pipelining; -: to stdout, without other output");
  command.flag("--json", options->json, "Print JSON lines and nothing else");
  add_force(command, options->force);
  command.footer("Example: stepgraph schedule --kind zb-h1 --stages 4 --microbatches 8 --costs 1,1,1,0.1 --json");
  command.run([options] {
    try {
      run_schedule(*options);
    } catch (const Error& error) {  // the library's messages begin with the same subject as the command's
      constexpr std::string_view subject = "schedule: ";
      const std::string_view what        = error.what();
      throw Error(error.kind(), std::string(what.starts_with(subject) ? what.substr(subject.size()) : what));
    }
  });
}

}  // namespace stepgraph::cli
