#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/schedule/csv.hpp"
#include "graphs/schedule/drawing.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/search.hpp"
#include "graphs/schedule/simulation.hpp"
#include "graphs/schedule/validate.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/schedule_compare.hpp"
#include "tools/stepgraph/targets.hpp"

namespace stepgraph::cli {
namespace {

struct ScheduleOptions {
  std::optional<std::string> kind, from, compare;
  std::optional<int> stages, microbatches;
  std::optional<std::string> chunks;
  std::string costs = "1,1,1,0";
  std::optional<double> limit, budget;
  std::optional<std::int64_t> seed;
  double retain = 1;
  std::optional<std::string> svg, csv, dot;
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

bool searches(const ScheduleOptions& options) {
  if (!options.compare) return options.kind == "auto";
  const std::vector<std::string> names = compared_names(*options.compare);
  return std::find(names.begin(), names.end(), "auto") != names.end();
}

// A schedule has a kind and its numbers, or a file. A comparison has several kinds.
void check_source(const ScheduleOptions& options) {
  if (options.compare) {
    const auto alone = [](std::string_view name, bool given, std::string_view why) {
      if (given) refuse(str(name, ": cannot be combined with --compare (", why, ")"));
    };
    alone("--kind", options.kind.has_value(), "the list has the kinds");
    alone("--from", options.from.has_value(), "the list can have files: 1f1b,mine.csv");
    alone("--csv", options.csv.has_value(), "one schedule: --kind");
  }
  const auto check = [](std::string_view name, bool given, bool wanted, std::string_view why) {
    if (given != wanted) refuse(str(name, given ? ": cannot be combined with --from" : ": missing", " (", why, ")"));
  };
  const bool has_kind = !options.from;
  if (!options.compare)
    check("--kind", options.kind.has_value(), has_kind,
          has_kind ? "the name of an order, or --from FILE.csv" : "the file has the order");
  check("--stages", options.stages.has_value(), has_kind,
        has_kind ? "the number of pipeline ranks" : "the file has a row for each rank");
  check("--microbatches", options.microbatches.has_value(), has_kind,
        has_kind ? "the number of microbatches" : "the file has the microbatches");
  if (options.from) check("--chunks", options.chunks.has_value(), false, "the file says which rank has which stages");
}

// --chunks as a number. 0: not given, or `any`, which only a search takes.
int num_chunks(const ScheduleOptions& options) {
  if (!options.chunks) return 0;
  constexpr int most           = 1 << 20;
  const std::string& text      = *options.chunks;
  const std::string searchable = searches(options) ? "1, 2 or any for auto" : "any is for auto";
  if (text == "any" && searches(options)) return 0;
  int number              = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size() || number < 1 || number > most)
    refuse(str("--chunks ", text, ": not a number from 1 to ", most, " (", searchable, ")"));
  if (searches(options) && number > 2) refuse(str("--chunks ", text, ": too many for auto (1, 2 or any)"));
  return number;
}

ScheduleKind kind_of(const std::string& name) {
  try {
    return parse_schedule_kind(name);
  } catch (const Error& error) {  // here a search has a name, too
    std::string message = error.what();
    if (message.ends_with(")")) message.insert(message.size() - 1, ", auto");
    refuse(message);
  }
}

// The schedule of a kind that has a name.
PipelineSchedule make_schedule(const ScheduleOptions& options, const std::string& name) {
  const ScheduleKind kind = kind_of(name);
  // Of several kinds, --chunks is for those that can have any number.
  const bool takes_chunks = kind <= ScheduleKind::gpipe || kind == ScheduleKind::interleaved;
  const int chunks        = options.compare && !takes_chunks ? 0 : num_chunks(options);
  return pipeline_schedule(kind, {.ranks = *options.stages, .microbatches = *options.microbatches, .chunks = chunks});
}

// The schedule of a file that is compared with kinds.
PipelineSchedule read_schedule(const ScheduleOptions& options, const std::string& path) {
  PipelineSchedule schedule = read_csv(path);
  if (schedule.num_ranks() != *options.stages || schedule.num_microbatches != *options.microbatches)
    refuse(str("--compare: ", path, " has ", schedule.num_ranks(), " ranks and ", schedule.num_microbatches,
               " microbatches (", *options.stages, " and ", *options.microbatches, ", as the others)"));
  return schedule;
}

ScheduleResult result_of(const ScheduleOptions& options, const Costs& costs, const std::string& name,
                         PipelineSchedule schedule) {
  ScheduleResult result{.name = name, .schedule = std::move(schedule), .facts = {}, .timeline = {}};
  result.facts    = validate(result.schedule);
  result.timeline = simulate(result.schedule, {.costs = {costs}, .retain = options.retain});
  return result;
}

// A line on stderr that is redrawn, on a terminal; otherwise a line every ten seconds.
class SearchLine {
 public:
  ~SearchLine() {
    if (drawn_) std::cerr << "\r\x1b[K" << std::flush;
  }
  void show(const SearchProgress& progress) {
    const bool terminal = isatty(STDERR_FILENO) == 1;
    if (!terminal && progress.elapsed_s < next_s_) return;
    next_s_ = progress.elapsed_s + 10;
    drawn_  = terminal;
    std::cerr << (terminal ? "\r\x1b[K" : "") << "auto " << std::fixed << std::setprecision(1) << progress.elapsed_s
              << " s  bubble rate " << std::setprecision(4) << progress.bubble_rate << "  bound "
              << progress.lower_bound_rate << "  " << progress.doing << std::defaultfloat << std::setprecision(6)
              << (terminal ? "" : "\n") << std::flush;
  }

 private:
  bool drawn_    = false;
  double next_s_ = 10;
};

ScheduleResult search_result(const ScheduleOptions& options, const Costs& costs) {
  const int chunks = num_chunks(options);
  ScheduleSearch search{.ranks        = *options.stages,
                        .microbatches = *options.microbatches,
                        .chunks       = options.chunks == "any" ? SearchChunks::any
                                        : chunks == 2           ? SearchChunks::two
                                                                : SearchChunks::one,
                        .costs        = {costs},
                        .retain       = options.retain,
                        .limit        = options.limit.value_or(0),
                        .budget_s     = options.budget.value_or(60),
                        .seed         = static_cast<std::uint64_t>(options.seed.value_or(0))};
  SearchLine line;
  search.on_progress    = [&](const SearchProgress& progress) { line.show(progress); };
  FoundSchedule found   = search_schedule(search);
  ScheduleResult result = result_of(options, costs, "auto", std::move(found.schedule));
  result.search         = {found.lower_bound_rate, search.limit, found.how, found.out_of_time};
  return result;
}

std::vector<ScheduleResult> make_results(const ScheduleOptions& options, const Costs& costs) {
  if (options.from) return {result_of(options, costs, *options.from, read_csv(*options.from))};
  std::vector<ScheduleResult> results;
  for (const std::string& name : options.compare ? compared_names(*options.compare) : std::vector{*options.kind}) {
    const bool is_file = options.compare && name.ends_with(".csv");
    if (name == "auto") {
      results.push_back(search_result(options, costs));
      continue;
    }
    results.push_back(
        result_of(options, costs, name, is_file ? read_schedule(options, name) : make_schedule(options, name)));
  }
  return results;
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

void print_text(const ScheduleOptions& options, const ScheduleResult& result) {
  const auto& [name, schedule, facts, timeline, search] = result;
  const auto count = [](int number, const char* what) { return str(number, " ", what, number == 1 ? "" : "s"); };
  std::cout << name << ": " << count(schedule.num_ranks(), "rank") << ", " << count(schedule.num_stages(), "stage")
            << ", " << count(schedule.num_microbatches, schedule.num_microbatches == 1 ? "microbatch" : "microbatche")
            << "; costs F,I,W,COMM " << options.costs;
  if (options.retain != 1) std::cout << ", retain " << options.retain;
  if (search && search->limit > 0) std::cout << ", limit " << search->limit;
  std::cout << "\n"
            << gantt_text(schedule, timeline, {.columns = terminal_columns(), .color = wants_color()})
            << "bubble rate     " << std::fixed << std::setprecision(4) << timeline.bubble_rate;
  if (search) {
    const std::string chunks = !options.chunks || options.chunks == "1" ? "one chunk"
                               : options.chunks == "2"                  ? "two chunks, looped or V placement"
                                                                        : "one chunk, and two in looped or V placement";
    std::cout << "\nlower bound     " << search->lower_bound << " (proved for " << chunks << "; the rate is "
              << timeline.bubble_rate - search->lower_bound << " above it)\nfound by        " << search->how
              << (search->out_of_time ? "; cut short by the time budget" : "");
  }
  std::cout << std::defaultfloat << std::setprecision(6) << "\nmakespan        " << timeline.makespan
            << " (longest span of a rank " << timeline.longest_span << ")\npeak activation";
  for (const double peak : timeline.peak_activation) std::cout << ' ' << peak;
  std::cout << "\nvalid; weight gradients are " << (facts.weights_in_order ? "" : "not ") << "in microbatch order\n";
}

void print_json(const ScheduleOptions& options, const ScheduleResult& result, const Costs& costs) {
  const auto& [name, schedule, facts, timeline, search] = result;
  const std::vector<int> chunks                         = schedule.stages_per_rank();
  const bool is_file                                    = options.from || (options.compare && name.ends_with(".csv"));
  JsonValue line                                        = {{"type", "schedule"}, {"kind", is_file ? "csv" : name}};
  if (is_file) line.set("file", name);
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
  if (search) {
    line.add({{"lower_bound", search->lower_bound},
              {"distance", timeline.bubble_rate - search->lower_bound},
              {"how", search->how},
              {"limit", search->limit},
              {"seed", options.seed.value_or(0)},
              {"out_of_time", search->out_of_time}});
  }
  std::cout << json_line(line) << "\n";
}

void run_schedule(const ScheduleOptions& options) {
  if (options.kind && options.kind != "auto") static_cast<void>(kind_of(*options.kind));  // throws for an unknown name
  check_source(options);
  static_cast<void>(num_chunks(options));
  if (options.budget && !searches(options))
    refuse(str("--budget ", *options.budget, ": nothing is searched (--kind auto)"));
  if (options.seed && !searches(options)) refuse(str("--seed ", *options.seed, ": nothing is searched (--kind auto)"));
  if (options.limit && !searches(options))
    refuse(str("--limit ", *options.limit, ": ",
               options.from   ? *options.from
               : options.kind ? *options.kind
                              : *options.compare,
               " has a fixed order (a limit is only for searched orders)"));
  if (options.svg == "-") refuse("--svg -: stdout is not supported (a file name)");
  if (options.svg && options.svg == options.csv)
    refuse(str("--svg and --csv: both write ", *options.svg, " (two files)"));
  if (options.json && options.csv == "-") refuse("--json and --csv -: both write to stdout (--csv FILE)");
  for (const auto& [name, path] : {std::pair("--svg", options.svg), std::pair("--csv", options.csv)}) {
    if (options.dot && options.dot == path) refuse(str(name, " and --dot: both write ", *path, " (two files)"));
  }
  if (options.json && options.dot == "-") refuse("--json and --dot -: both write to stdout (--dot FILE)");
  check_target("--svg", options.svg, FileKind::svg, options.force);
  if (options.dot != "-") check_target("--dot", options.dot, FileKind::dot, options.force);
  if (options.csv != "-") check_target("--csv", options.csv, FileKind::csv, options.force);
  const Costs costs                         = parse_costs(options.costs);
  const std::vector<ScheduleResult> results = make_results(options, costs);
  write_pictures(results, costs, options.svg, options.dot);
  const PipelineSchedule& first = results.front().schedule;
  if (options.csv == "-") write_csv(first, std::cout);
  if (options.csv == "-" || options.dot == "-") return;
  if (options.csv) write_stream(*options.csv, [&](std::ostream& out) { write_csv(first, out); });
  if (options.json) {
    for (const ScheduleResult& result : results) print_json(options, result, costs);
  } else if (options.compare) {
    std::cout << comparison_table(results);
  } else {
    print_text(options, results.front());
  }
}

}  // namespace

void add_schedule(Command program) {
  Command command = program.subcommand(
      "schedule", "Build, check and simulate a pipeline schedule: timeline, bubble rate, activation memory");
  auto options = std::make_shared<ScheduleOptions>();
  command.option("--kind", options->kind,
                 "Order of the actions: round-robin, sequential, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, "
                 "v-min, dualpipe-v, or auto: search for the least bubble. Needed without --from and --compare");
  command.option("--compare", options->compare,
                 "Instead of --kind: several kinds or files, 1f1b,zb-h1,zb-v. Prints a table; --svg draws all of them "
                 "under one time axis");
  command.option("--stages", options->stages, "Pipeline ranks (P). Needed without --from").between(1, 1 << 20);
  command.option("--microbatches", options->microbatches, "Microbatches (M). Needed without --from")
      .between(1, 1 << 24);
  command.option(
      "--chunks", options->chunks,
      "Stages of each rank (V), unless given 2 for zb-v, v-half, v-min and dualpipe-v, otherwise 1; there are "
      "P*V stages. With --compare: of kinds that can have any number. For auto: 1, 2 (looped or V placement) or "
      "any");
  command.option(
      "--from", options->from,
      "Instead of --kind, --stages and --microbatches: read the schedule from a CSV file, as --csv writes it");
  command.option(
      "--costs", options->costs,
      "F,I,W,COMM: the times of forward, input gradient and weight gradient for one microbatch on one rank, and "
      "of one transfer. A chunk takes 1/V of the first three");
  command.option("--limit", options->limit,
                 "auto: the most activations of a rank, in microbatches of a rank, at least 1; unless given, no limit");
  command.option("--budget", options->budget, "auto: the longest time of the search in seconds, 60 unless given")
      .between(0.001, 1e6);
  command.option("--seed", options->seed, "auto: of the search, 0 unless given; the same seed gives the same schedule")
      .between(std::int64_t{0}, std::numeric_limits<std::int64_t>::max());
  command.option("--retain", options->retain, "Share of the activations that is kept from the end of I to the end of W")
      .between(0.0, 1.0);
  command.option("--svg", options->svg, "Draw the timeline to an SVG file");
  command.option(
      "--dot", options->dot,
      "Write the graph of the schedule in Graphviz format to a file, with --compare one graph after another; -: "
      "to stdout, without other output");
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
