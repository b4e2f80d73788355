#include <memory>
#include <optional>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/runnable_graph.hpp"
#include "engine/run/streams.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/step/training_step.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/session/config_options.hpp"
#include "tools/stepgraph/session/measured_device.hpp"
#include "tools/stepgraph/session/plan_text.hpp"
#include "tools/stepgraph/session/session.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {
namespace {

// The streams and event waits that a device would use, with all ranks in one process, and the workspaces that the
// config's backend needs for bodies and for communication.
StreamPlan proved_streams(const RunnableGraph& runnable, WorkspaceNeeds needs, std::vector<Finding>& findings) {
  const LoopbackWorld world(runnable.graph().num_ranks());
  StreamPlan streams = plan_streams(runnable, world);
  const bool counted = needs.bodies;  // in the memory plan: on the host nothing is
  needs.bodies       = true;
  if (needs.part) streams = plan_streams(runnable, std::vector<std::uint32_t>(streams.issue_order), needs);
  try {
    verify_streams(runnable, streams, needs);
    if (counted) check_workspaces(*runnable.memory(), streams);
  } catch (const Error& error) {
    findings.push_back({Flaw::race, error.what()});
  }
  return streams;
}

// Verifies the training step and the forward step of eval: the graph, its memory plan, and the streams of devices. No
// device is needed.
void run_verify(const ConfigOptions& options) {
  const Config config = read(options);
  check_offload_there(config);
  const Model model = model_of(config);
  std::vector<Finding> findings;
  const auto look = [&](const StepGraph& step, const char* name) {
    for (const Finding& flaw : find_flaws(step)) findings.push_back(flaw);
    if (!findings.empty()) return;  // a graph with a cycle has no memory plan
    const RunnableGraph runnable(step.graph, plan_memory(step.graph, planning_of(config)));
    for (const Finding& flaw : find_flaws(runnable)) findings.push_back(flaw);
    std::optional<StreamPlan> streams;
    if (findings.empty()) streams = proved_streams(runnable, workspaces_of(config), findings);
    print_line(plan_text(config, step, step_size(step, *runnable.memory()),
                         {.json = options.json, .step = name, .streams = streams ? &*streams : nullptr}));
  };
  const std::optional<Machine> machine       = chooser_machine(config);
  const std::optional<MeasuredDevice> device = measured_device(config);
  const StepOptions building                 = building_options(config, machine, device);
  const StepGraph training                   = training_step(model, config.plan, config.batch, building);
  note_idle_settings("verify", config, use_of(training.offload.units));
  look(training, "training");
  if (findings.empty()) look(forward_step(model, config.plan, config.batch, ForwardResult::loss, building), "forward");

  if (options.json) {
    JsonValue flaws = JsonValue::list();
    for (const Finding& flaw : findings)
      flaws.items.push_back({{"flaw", to_string(flaw.flaw)}, {"message", flaw.message}});
    print_line(json_line({{"type", "verify"}, {"valid", findings.empty()}, {"flaws", flaws}}));
  } else {
    for (const Finding& flaw : findings) print_line(str(to_string(flaw.flaw), ": ", flaw.message));
    if (findings.empty())
      print_line(
          "valid: no race, no deadlock, all communication matches, no two live buffers share memory, streams wait "
          "for their predecessors");
  }
  if (!findings.empty())
    throw Error(ErrorKind::graph, str(findings.size(), findings.size() == 1 ? " flaw" : " flaws", " (none)"));
}

}  // namespace

void add_verify(Command program) {
  Command command = program.subcommand("verify",
                                       "Prove the training step and the forward step of a config, without running "
                                       "them: no races, no deadlocks, communication that matches, memory, and the "
                                       "streams of devices. Exits with 1 if there is a flaw");
  auto options    = std::make_shared<ConfigOptions>();
  add_config_options(command, *options, false);
  command.footer("Example: stepgraph verify run.json --set layout.pp=4 --set pipeline.schedule=zb-h1");
  command.run([options] { run_verify(*options); });
}

}  // namespace stepgraph::cli
