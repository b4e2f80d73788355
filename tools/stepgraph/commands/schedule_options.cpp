#include "tools/stepgraph/commands/schedule_options.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "tools/stepgraph/session/targets.hpp"

namespace stepgraph::cli {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::config, message); }

Costs parse_cost(std::string_view text) {
  Costs costs;
  const std::vector<std::string_view> numbers = split_text(text, ',');
  const std::array times{&costs.F, &costs.I, &costs.W, &costs.COMM};
  bool good = numbers.size() == times.size();
  for (std::size_t i = 0; good && i < times.size(); ++i) {
    double& time            = *times[i];
    const char* const last  = numbers[i].data() + numbers[i].size();
    const auto [end, error] = std::from_chars(numbers[i].data(), last, time);
    good                    = error == std::errc{} && end == last && time >= 0 && std::isfinite(time);
    time += 0.0;  // no -0
  }
  if (!good) refuse(str("--costs '", text, "': four numbers, none negative (F,I,W,COMM: 1,1,1,0.1)"));
  if (!(costs.F + costs.I + costs.W > 0))
    refuse(str("--costs '", text, "': F, I and W are all 0 (at least one above 0)"));
  return costs;
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

void check_search_options(const ScheduleOptions& options) {
  static_cast<void>(limit_of(options));
  if (searches(options)) return;
  if (options.budget) refuse(str("--budget ", *options.budget, ": nothing is searched (--kind auto)"));
  if (options.seed) refuse(str("--seed ", *options.seed, ": nothing is searched (--kind auto)"));
  if (options.limit)
    refuse(str("--limit ", *options.limit, ": ",
               options.from   ? *options.from
               : options.kind ? *options.kind
                              : *options.compare,
               " has a fixed order (a limit is only for searched orders)"));
}

void check_targets(const ScheduleOptions& options) {
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
}

}  // namespace

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

std::vector<Costs> parse_costs(std::string_view text) {
  std::vector<Costs> costs;
  for (const std::string_view one : split_text(text, '/')) costs.push_back(parse_cost(one));
  return costs;
}

bool searches(const ScheduleOptions& options) {
  if (!options.compare) return options.kind == "auto";
  const std::vector<std::string> names = compared_names(*options.compare);
  return std::find(names.begin(), names.end(), "auto") != names.end();
}

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

double limit_of(const ScheduleOptions& options) {
  if (!options.limit) return 0;
  const std::string& text = *options.limit;
  double units            = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), units);
  if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(units))
    refuse(str("--limit ", text, ": not a number of microbatches (4, 2.5; bytes are for pipeline.limit of a config)"));
  if (units < 1)
    refuse(str("--limit ", text, ": at least 1, which a single microbatch holds (without --limit there is no limit)"));
  return units;
}

ScheduleKind kind_of(const std::string& name) {
  static constexpr std::array<std::string_view, 1> searched{"auto"};
  return parse_schedule_kind(name, searched);
}

void check_options(const ScheduleOptions& options) {
  if (options.kind && options.kind != "auto") static_cast<void>(kind_of(*options.kind));  // throws for an unknown name
  check_source(options);
  static_cast<void>(num_chunks(options));
  check_search_options(options);
  check_targets(options);
}

void add_schedule_options(Command& command, ScheduleOptions& options) {
  command.option("--kind", options.kind,
                 "Order of the actions: round-robin, sequential, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, "
                 "v-min, dualpipe-v, or auto: search for the least bubble. Needed without --from and --compare");
  command.option("--compare", options.compare,
                 "Instead of --kind: several kinds or files, 1f1b,zb-h1,zb-v. Prints a table; --svg draws all of them "
                 "under one time axis");
  command.option("--stages", options.stages, "Pipeline ranks (P). Needed without --from").between(1, 1 << 20);
  command.option("--microbatches", options.microbatches, "Microbatches (M). Needed without --from").between(1, 1 << 24);
  command.option(
      "--chunks", options.chunks,
      "Stages of each rank (V), unless given 2 for zb-v, v-half, v-min and dualpipe-v, otherwise 1; there are "
      "P*V stages. With --compare: of kinds that can have any number. For auto: 1, 2 (looped or V placement) or "
      "any");
  command.option(
      "--from", options.from,
      "Instead of --kind, --stages and --microbatches: read the schedule from a CSV file, as --csv writes it");
  command.option(
      "--costs", options.costs,
      "F,I,W,COMM: the times of forward, input gradient and weight gradient for one microbatch on one rank, and "
      "of one transfer. A chunk takes 1/V of the first three. One for each rank, or for each of the P*V stages, whose "
      "times are as given: 1,1,1,0/1,1,1,0/2,2,1,0");
  command.option("--limit", options.limit,
                 "auto: the most activations of a rank, in microbatches of a rank, at least 1; unless given, no limit");
  command.option("--budget", options.budget, "auto: the longest time of the search in seconds, 60 unless given")
      .between(0.001, 1e6);
  command.option("--seed", options.seed, "auto: of the search, 0 unless given; the same seed gives the same schedule")
      .between(std::int64_t{0}, std::numeric_limits<std::int64_t>::max());
  command.option("--retain", options.retain, "Share of the activations that is kept from the end of I to the end of W")
      .between(0.0, 1.0);
  command.option("--svg", options.svg, "Draw the timeline to an SVG file");
  command.option(
      "--dot", options.dot,
      "Write the graph of the schedule in Graphviz format to a file, with --compare one graph after another; -: "
      "to stdout, without other output");
  command.option(
      "--csv", options.csv,
      "Write the schedule to a file in the format of torch.distributed.pipelining; -: to stdout, without other output");
  command.flag("--json", options.json, "Print JSON lines and nothing else");
  add_force(command, options.force);
}

}  // namespace stepgraph::cli
