#include <iostream>
#include <memory>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "graphs/schedule/csv.hpp"
#include "graphs/schedule/search.hpp"
#include "graphs/schedule/simulation.hpp"
#include "graphs/schedule/validate.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/commands/schedule_options.hpp"
#include "tools/stepgraph/commands/schedule_report.hpp"
#include "tools/stepgraph/session/search_line.hpp"

namespace stepgraph::cli {
namespace {

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
    throw Error(ErrorKind::config,
                str("--compare: ", path, " has ", schedule.num_ranks(), " ranks and ", schedule.num_microbatches,
                    " microbatches (", *options.stages, " and ", *options.microbatches, ", as the others)"));
  return schedule;
}

ScheduleResult result_of(const ScheduleOptions& options, const std::vector<Costs>& costs, const std::string& name,
                         PipelineSchedule schedule) {
  const bool is_file = options.from || name.ends_with(".csv");
  ScheduleResult result{.name = name, .is_file = is_file, .schedule = std::move(schedule), .facts = {}, .timeline = {}};
  try {
    result.facts = validate(result.schedule);
  } catch (const Error& error) {
    if (!is_file) throw;
    throw Error(error.kind(), str(name, ": ", error.what()));
  }
  result.timeline = simulate(result.schedule, {.costs = costs, .retain = options.retain});
  return result;
}

// What was searched. Costs of two stages for each rank are for two chunks only.
std::string chunks_text(const ScheduleSearch& search) {
  if (search.chunks == SearchChunks::one) return "one chunk";
  const bool by_stage = search.ranks > 1 && search.costs.size() == 2 * static_cast<std::size_t>(search.ranks);
  return search.chunks == SearchChunks::two || by_stage ? "two chunks, looped or V placement"
                                                        : "one chunk, and two in looped or V placement";
}

ScheduleResult search_result(const ScheduleOptions& options, const std::vector<Costs>& costs) {
  const int chunks = num_chunks(options);
  ScheduleSearch search{.ranks        = *options.stages,
                        .microbatches = *options.microbatches,
                        .chunks       = options.chunks == "any" ? SearchChunks::any
                                        : chunks == 2           ? SearchChunks::two
                                                                : SearchChunks::one,
                        .costs        = costs,
                        .retain       = options.retain,
                        .limit        = limit_of(options),
                        .budget_s     = options.budget.value_or(60),
                        .seed         = static_cast<std::uint64_t>(options.seed.value_or(0))};
  SearchLine line;
  search.on_progress  = [&](const SearchProgress& progress) { line.show(progress); };
  FoundSchedule found = search_schedule(search);
  if (found.out_of_time) {
    std::cerr << "auto: the search was cut short by its budget of " << search.budget_s
              << " s: another run may give another schedule (a higher --budget)\n";
  }
  ScheduleResult result = result_of(options, costs, "auto", std::move(found.schedule));
  result.search         = {.lower_bound = found.lower_bound_rate,
                           .limit       = search.limit,
                           .how         = found.how,
                           .chunks      = chunks_text(search),
                           .seed        = options.seed.value_or(0),
                           .out_of_time = found.out_of_time};
  return result;
}

std::vector<ScheduleResult> make_results(const ScheduleOptions& options, const std::vector<Costs>& costs) {
  if (options.from) return {result_of(options, costs, *options.from, read_csv(*options.from))};
  std::vector<ScheduleResult> results;
  for (const std::string& name : options.compare ? compared_names(*options.compare) : std::vector{*options.kind}) {
    if (name == "auto") {
      results.push_back(search_result(options, costs));
    } else {
      const bool is_file = name.ends_with(".csv");
      results.push_back(
          result_of(options, costs, name, is_file ? read_schedule(options, name) : make_schedule(options, name)));
    }
  }
  return results;
}

void run_schedule(const ScheduleOptions& options) {
  check_options(options);
  const ScheduleRequest request{parse_costs(options.costs), options.costs, options.retain};
  const std::vector<ScheduleResult> results = make_results(options, request.costs);
  write_pictures(results, request.costs, options.svg, options.dot);
  const PipelineSchedule& first = results.front().schedule;
  if (options.csv == "-") write_csv(first, std::cout);
  if (options.csv == "-" || options.dot == "-") return;
  if (options.csv) write_stream(*options.csv, [&](std::ostream& out) { write_csv(first, out); });
  if (options.json) {
    for (const ScheduleResult& result : results) print_json(request, result);
  } else if (options.compare) {
    std::cout << comparison_table(results);
  } else {
    print_text(request, results.front());
  }
}

}  // namespace

void add_schedule(Command program) {
  Command command = program.subcommand(
      "schedule", "Build, check and simulate a pipeline schedule: timeline, bubble rate, activation memory");
  auto options = std::make_shared<ScheduleOptions>();
  add_schedule_options(command, *options);
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
