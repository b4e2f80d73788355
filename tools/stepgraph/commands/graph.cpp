#include <iostream>
#include <memory>

#include "engine/base/error.hpp"
#include "engine/draw/dot.hpp"
#include "graphs/step/training_step.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/session/config_options.hpp"
#include "tools/stepgraph/session/measured_device.hpp"
#include "tools/stepgraph/session/plan_text.hpp"
#include "tools/stepgraph/session/session.hpp"
#include "tools/stepgraph/session/targets.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {
namespace {

struct GraphOptions {
  ConfigOptions config;
  std::optional<std::string> dot, svg;
  std::optional<int> rank;
  std::optional<std::string> detail;
  bool forward = false, force = false;
};

void run_graph(const GraphOptions& options) {
  if ((options.rank || options.detail) && !options.dot && !options.svg)
    throw Error(ErrorKind::config,
                str(options.rank ? "--rank" : "--detail", ": has no effect without a drawing (add --dot or --svg)"));
  if (options.svg == "-") throw Error(ErrorKind::config, "--svg -: stdout is not supported (a file name)");
  if (options.config.json && options.dot == "-")
    throw Error(ErrorKind::config, "--json and --dot -: both write to stdout (--dot FILE)");
  if (options.dot && options.dot == options.svg)
    throw Error(ErrorKind::config, str("--dot and --svg: both write ", *options.svg, " (two files)"));
  if (options.dot != "-") check_target("--dot", options.dot, FileKind::dot, options.force);
  check_target("--svg", options.svg, FileKind::svg, options.force);
  const Config config = read(options.config);
  check_offload_there(config);
  const int num_ranks = Layout(config.plan.layout).num_ranks();
  if (options.rank && (*options.rank < 0 || *options.rank >= num_ranks))
    throw Error(ErrorKind::config, str("--rank ", *options.rank, ": is not in the layout (0 to ", num_ranks - 1, ")"));
  const Model model                          = model_of(config);
  const std::optional<Machine> machine       = chooser_machine(config);
  const std::optional<MeasuredDevice> device = measured_device(config);
  const StepOptions building                 = building_options(config, machine, device);
  const StepGraph step = options.forward ? forward_step(model, config.plan, config.batch, ForwardResult::loss, building)
                                         : training_step(model, config.plan, config.batch, building);
  const MemoryPlan plan = plan_memory(step.graph, planning_of(config));
  const OrderedGraph ordered(step.graph, plan);
  DotOptions drawing{.title =
                         str(model.kind, ", ", to_string(config.plan.layout), ", ", config.plan.pipeline.schedule)};
  for (const Detail detail : {Detail::stage, Detail::layer, Detail::op}) {
    if (options.detail == to_string(detail)) drawing.detail = detail;
  }
  if (options.rank) drawing.rank = Rank{*options.rank};
  if (options.dot == "-") return write_dot(ordered, std::cout, drawing);
  if (options.dot) write_dot(ordered, *options.dot, drawing);
  if (options.svg) write_svg(ordered, *options.svg, drawing);
  print_line(plan_text(config, step, step_size(step, plan), {.json = options.config.json}));
}

}  // namespace

void add_graph(Command program) {
  Command command = program.subcommand("graph", "Build the graph of a step; print its size or draw it");
  auto options    = std::make_shared<GraphOptions>();
  add_config_options(command, options->config, false);
  command.option("--dot", options->dot,
                 "Write the graph in Graphviz format to a file; -: to stdout, without other output");
  command.option("--svg", options->svg, "Draw the graph to an SVG file (needs Graphviz's dot)");
  command.option("--rank", options->rank, "Draw only this rank");
  command
      .option("--detail", options->detail,
              str("What one box shows: a stage, a layer or an op (default: ", to_string(DotOptions{}.detail), ")"))
      .one_of({"stage", "layer", "op"});
  command.flag("--forward", options->forward, "The forward step of eval instead of the training step");
  add_force(command, options->force);
  command.footer("Example: stepgraph graph run.json --rank 0 --detail layer --svg step.svg");
  command.run([options] { run_graph(*options); });
}

}  // namespace stepgraph::cli
