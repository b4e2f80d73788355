#include <memory>
#include <nlohmann/json.hpp>

#include "engine/base/error.hpp"
#include "graphs/step/memory_limit.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/output.hpp"
#include "tools/stepgraph/session.hpp"

namespace stepgraph::cli {
namespace {

struct PlanMemoryOptions {
  ConfigOptions config;
  std::optional<int> rank;
  bool forward = false;
};

std::string json_line(const MemoryRequirement& row) {
  nlohmann::ordered_json line = {{"type", "memory"}, {"rank", index(row.rank)}};
  line["ranks"]               = nlohmann::ordered_json::array();
  for (const Rank rank : row.ranks) line["ranks"].push_back(index(rank));
  for (const MemoryRole role : all_memory_roles) line[std::string(to_string(role))] = row[role];
  line["unused"]            = row.unused_bytes;
  line["peak_bytes"]        = row.peak_bytes;
  line["lower_bound_bytes"] = row.lower_bound_bytes;
  line["node"]              = row.node;
  return line.dump();
}

void run_plan_memory(const PlanMemoryOptions& options) {
  const Config config = read(options.config);
  const int num_ranks = Layout(config.plan.layout).num_ranks();
  if (options.rank && (*options.rank < 0 || *options.rank >= num_ranks))
    throw Error(ErrorKind::config, str("--rank ", *options.rank, ": is not in the layout (0 to ", num_ranks - 1, ")"));
  MemoryRequirementOptions asked{.trains = !options.forward};
  if (options.rank) asked.rank = Rank{*options.rank};
  const Model model = model_of(config);
  const auto rows   = memory_requirements(model, config.plan, config.batch, asked);
  if (options.config.json) {
    for (const MemoryRequirement& row : rows) print_line(json_line(row));
  } else {
    print_line(str(memory_table(rows), "rank ", largest(rows).rank, " needs most, in '", largest(rows).node, "'"));
  }
  check_memory_limit(rows, model, config.plan, config.batch, asked);
}

}  // namespace

void add_plan_memory(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("plan-memory",
                         "The memory that each rank of a training step needs, by what it is for: read off the plan of "
                         "its memory, without running, so that a model may be larger than this machine. Ranks that are "
                         "alike are one row; exits with 2 where one needs more than memory.limit_bytes");
  auto options = std::make_shared<PlanMemoryOptions>();
  add_config_options(*command, options->config, false);
  command->add_option("--rank", options->rank, "This rank and those that are like it only");
  command->add_flag("--forward", options->forward, "The step of eval, forward only");
  command->footer("Example: stepgraph plan-memory run.json --set layout.pp=4 --set recompute=full");
  command->callback([options] { run_plan_memory(*options); });
}

}  // namespace stepgraph::cli
