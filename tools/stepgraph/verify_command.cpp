#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/runnable_graph.hpp"
#include "engine/run/streams.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/step/training_step.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/output.hpp"
#include "tools/stepgraph/session.hpp"

namespace stepgraph::cli {
namespace {

// As a device would have them; all ranks in one process.
StreamPlan proved_streams(const RunnableGraph& runnable, std::vector<Finding>& findings) {
  const LoopbackWorld world(runnable.graph().num_ranks());
  StreamPlan streams = plan_streams(runnable, world);
  try {
    verify_streams(runnable, streams);
  } catch (const Error& error) {
    findings.push_back({Flaw::race, error.what()});
  }
  return streams;
}

// The training step and the forward step of eval: as graphs, then in the memory that is planned for them, then on the
// streams of devices, of which none is needed.
void run_verify(const ConfigOptions& options) {
  const Config config = read(options);
  const Model model   = model_of(config);
  std::vector<Finding> findings;
  const auto look = [&](const StepGraph& step, const char* name) {
    for (const Finding& flaw : find_flaws(step)) findings.push_back(flaw);
    if (!findings.empty()) return;  // a plan of a graph with a cycle cannot be made
    const RunnableGraph runnable(step.graph, plan_memory(step.graph, {.reuse = config.plan.reuse}));
    for (const Finding& flaw : find_flaws(runnable)) findings.push_back(flaw);
    std::optional<StreamPlan> streams;
    if (findings.empty()) streams = proved_streams(runnable, findings);
    print_line(plan_text(config, step, *runnable.memory(),
                         {.json = options.json, .step = name, .streams = streams ? &*streams : nullptr}));
  };
  look(training_step(model, config.plan, config.batch), "training");
  if (findings.empty()) look(forward_step(model, config.plan, config.batch), "forward");

  if (options.json) {
    nlohmann::ordered_json line = {{"type", "verify"}, {"valid", findings.empty()}};
    line["flaws"]               = nlohmann::ordered_json::array();
    for (const Finding& flaw : findings)
      line["flaws"].push_back({{"flaw", to_string(flaw.flaw)}, {"message", flaw.message}});
    print_line(line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } else {
    for (const Finding& flaw : findings) print_line(str(to_string(flaw.flaw), ": ", flaw.message));
    if (findings.empty())
      print_line(
          "valid: no race, no deadlock, every part is met, memory is used by one at a time, streams wait for "
          "what they follow");
  }
  if (!findings.empty())
    throw Error(ErrorKind::graph, str(findings.size(), findings.size() == 1 ? " flaw" : " flaws", " (none)"));
}

}  // namespace

void add_verify(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "verify",
      "Prove a config's steps before anything runs: races, deadlocks, communication that does not match, "
      "memory, the streams and event waits of devices; exits with 1 where there is a flaw");
  auto options = std::make_shared<ConfigOptions>();
  add_config_options(*command, *options, false);
  command->footer("Example: stepgraph verify run.json --set layout.pp=4 --set pipeline.schedule=zb-h1");
  command->callback([options] { run_verify(*options); });
}

}  // namespace stepgraph::cli
