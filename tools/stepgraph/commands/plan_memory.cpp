#include <algorithm>
#include <memory>
#include <span>

#include "engine/base/error.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/step/memory_limit.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/session/config_options.hpp"
#include "tools/stepgraph/session/measured_device.hpp"
#include "tools/stepgraph/session/plan_text.hpp"
#include "tools/stepgraph/session/session.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {
namespace {

struct PlanMemoryOptions {
  ConfigOptions config;
  std::optional<int> rank;
  bool forward = false;
};

std::string row_line(const MemoryRequirement& row) {
  std::vector<int> ranks;
  for (const Rank rank : row.ranks) ranks.push_back(index(rank));
  JsonValue line = {{"type", "memory"}, {"rank", index(row.rank)}, {"ranks", ranks}};
  for (const MemoryRole role : all_memory_roles) line.set(to_string(role), row[role]);
  line.add({{"unused", row.unused_bytes},
            {"workspace", row.workspace_bytes},
            {"peak_bytes", row.peak_bytes},
            {"lower_bound_bytes", row.lower_bound_bytes},
            {"host_bytes", row.host_bytes},
            {"disk_bytes", row.disk_bytes},
            {"node", row.node}});
  if (row.workspace_bytes > 0) line.set("workspace_node", row.workspace_node);
  if (row.layers) line.set("activation_layers", activations_json(*row.layers));
  return json_line(line);
}

// The node that needs the largest workspace; empty if there are none.
std::string workspace_text(std::span<const MemoryRequirement> rows) {
  const MemoryRequirement& most = *std::max_element(
      rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.workspace_bytes < b.workspace_bytes; });
  if (most.workspace_bytes == 0) return {};
  return str("\nworkspace: rank ", most.rank, ", for '", most.workspace_node, "'");
}

// With recompute auto: what was chosen for each row.
std::string activations_text(std::span<const MemoryRequirement> rows) {
  std::string out;
  for (const MemoryRequirement& row : rows) {
    if (row.layers) out += str("\nactivations: rank ", row.rank, ": ", to_text(*row.layers));
  }
  return out;
}

void run_plan_memory(const PlanMemoryOptions& options) {
  const Config config = read(options.config);
  check_offload_there(config);
  const int num_ranks = Layout(config.plan.layout).num_ranks();
  if (options.rank && (*options.rank < 0 || *options.rank >= num_ranks))
    throw Error(ErrorKind::config, str("--rank ", *options.rank, ": is not in the layout (0 to ", num_ranks - 1, ")"));
  const std::optional<Machine> machine       = chooser_machine(config);
  const std::optional<MeasuredDevice> device = measured_device(config);
  MemoryRequirementOptions asked{.trains              = !options.forward,
                                 .join_tied_first     = joins_tied_first(config),
                                 .machine             = pointer_to(machine),
                                 .simulator           = simulator_of(device),
                                 .issue_order         = issue_order_of(config),
                                 .workspaces          = workspaces_of(config),
                                 .offload_rates       = offload_rates_of(config, device),
                                 .device_memory_bytes = memory_of(device)};
  if (options.rank) asked.rank = Rank{*options.rank};
  const Model model = model_of(config);
  const auto rows   = memory_requirements(model, config.plan, config.batch, asked);
  if (options.config.json) {
    for (const MemoryRequirement& row : rows) print_line(row_line(row));
  } else {
    print_line(str(memory_table(rows), "peak: rank ", largest(rows).rank, ", in '", largest(rows).node, "'",
                   workspace_text(rows), activations_text(rows)));
  }
  // Rows do not say which tensors are moved: only what is certain is noted.
  OffloadUse use{};
  for (const MemoryRequirement& row : rows) {
    use.something |= row.host_bytes > 0 || row.disk_bytes > 0;
    use.disk |= row.disk_bytes > 0;
  }
  use.params = use.compressed = use.something;
  if (!options.forward) note_idle_settings("plan-memory", config, use);
  check_memory_limit(rows, model, config.plan, config.batch, asked);
}

}  // namespace

void add_plan_memory(Command program) {
  Command command = program.subcommand("plan-memory",
                                       "The memory that each rank needs for a training step, by role (weights, "
                                       "gradients, activations, ...). Nothing runs, so the model may be larger than "
                                       "this machine. Ranks that need the same are one row. Exits with 2 if a rank "
                                       "needs more than memory.limit_bytes or offload.device_bytes");
  auto options    = std::make_shared<PlanMemoryOptions>();
  add_config_options(command, options->config, false);
  command.option("--rank", options->rank, "Only this rank, at the cost of its slice, however many ranks there are");
  command.flag("--forward", options->forward, "The forward step of eval instead of the training step");
  command.footer("Example: stepgraph plan-memory run.json --set layout.pp=4 --set recompute=full");
  command.run([options] { run_plan_memory(*options); });
}

}  // namespace stepgraph::cli
