#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "graphs/schedule/graph.hpp"
#include "graphs/schedule/kinds.hpp"
#include "tools/stepgraph/command_line.hpp"

// The options of `stepgraph schedule`.
namespace stepgraph::cli {

struct ScheduleOptions {
  std::optional<std::string> kind, from, compare;
  std::optional<int> stages, microbatches;
  std::optional<std::string> chunks;
  std::string costs = "1,1,1,0";
  std::optional<std::string> limit;
  std::optional<double> budget;
  std::optional<std::int64_t> seed;
  double retain = 1;
  std::optional<std::string> svg, csv, dot;
  bool json = false, force = false;
};

void add_schedule_options(Command& command, ScheduleOptions& options);

// Throws Error(config) where options are wrong, missing or do not fit together, and where a file would be lost.
void check_options(const ScheduleOptions& options);

// Whether a schedule is searched for.
[[nodiscard]] bool searches(const ScheduleOptions& options);

// --chunks as a number. 0: not given, or `any`, which only a search takes.
[[nodiscard]] int num_chunks(const ScheduleOptions& options);

// --limit as a number. 0: not given. Throws Error(config) below 1, and for bytes.
[[nodiscard]] double limit_of(const ScheduleOptions& options);

// The kind of this name. Throws Error(config) with all names, `auto` included.
[[nodiscard]] ScheduleKind kind_of(const std::string& name);

// The names in "1f1b,zb-h1". Throws Error(config) where one is empty or given twice.
[[nodiscard]] std::vector<std::string> compared_names(std::string_view list);

// "1,1,1,0" for all ranks; or one for each rank or stage: "1,1,1,0/1,2,1,0". How many there are is not checked here.
[[nodiscard]] std::vector<Costs> parse_costs(std::string_view text);

}  // namespace stepgraph::cli
