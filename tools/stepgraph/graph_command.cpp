#include <iostream>
#include <memory>

#include "engine/base/error.hpp"
#include "engine/draw/dot.hpp"
#include "graphs/step/training_step.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/output.hpp"
#include "tools/stepgraph/session.hpp"

namespace stepgraph::cli {
namespace {

struct GraphOptions {
  ConfigOptions config;
  std::optional<std::string> dot, svg;
  std::optional<int> rank;
  std::optional<std::string> detail;
  bool forward = false;
};

void run_graph(const GraphOptions& options) {
  if ((options.rank || options.detail) && !options.dot && !options.svg)
    throw Error(ErrorKind::config, str(options.rank ? "--rank" : "--detail",
                                       ": says how to draw, but nothing is drawn (--dot or --svg as well)"));
  if (options.svg == "-") throw Error(ErrorKind::config, "--svg -: a drawing goes to a file (give its name)");
  if (options.config.json && options.dot == "-")
    throw Error(ErrorKind::config, "--json and --dot -: both want stdout (give --dot a file)");
  if (options.dot && options.dot == options.svg)
    throw Error(ErrorKind::config, str("--dot and --svg: both ", *options.svg, " (two files)"));
  if (options.dot != "-") check_can_write("--dot", options.dot);
  check_can_write("--svg", options.svg);
  const Config config = read(options.config);
  const int num_ranks = Layout(config.plan.layout).num_ranks();
  if (options.rank && (*options.rank < 0 || *options.rank >= num_ranks))
    throw Error(ErrorKind::config, str("--rank ", *options.rank, ": is not in the layout (0 to ", num_ranks - 1, ")"));
  const Model model     = model_of(config);
  const StepGraph step  = options.forward ? forward_step(model, config.plan, config.batch)
                                          : training_step(model, config.plan, config.batch);
  const MemoryPlan plan = plan_memory(step.graph, {.reuse = config.plan.reuse});
  const OrderedGraph ordered(step.graph, plan);
  DotOptions drawing{
      .detail = options.detail == "op"      ? Detail::op
                : options.detail == "layer" ? Detail::layer
                                            : Detail::stage,
      .title  = str(model.kind, ", ", to_string(config.plan.layout), ", ", config.plan.pipeline.schedule)};
  if (options.rank) drawing.rank = Rank{*options.rank};
  if (options.dot == "-") return write_dot(ordered, std::cout, drawing);
  if (options.dot) write_dot(ordered, *options.dot, drawing);
  if (options.svg) write_svg(ordered, *options.svg, drawing);
  print_line(plan_text(config, step, plan, {.json = options.config.json}));
}

}  // namespace

void add_graph(CLI::App& app) {
  CLI::App* command = app.add_subcommand("graph", "The graph of a step: its size, or drawn");
  auto options      = std::make_shared<GraphOptions>();
  add_config_options(*command, options->config, false);
  command->add_option("--dot", options->dot, "Draw it to a file for Graphviz; -: to stdout, and nothing else");
  command->add_option("--svg", options->svg, "Draw it to a file (needs Graphviz's dot)");
  command->add_option("--rank", options->rank, "Draw this rank only");
  command->add_option("--detail", options->detail, "What a box stands for: stage (the default), layer or op")
      ->check(CLI::IsMember({"stage", "layer", "op"}));
  command->add_flag("--forward", options->forward, "The step of eval, forward only");
  command->footer("Example: stepgraph graph run.json --rank 0 --detail layer --svg step.svg");
  command->callback([options] { run_graph(*options); });
}

}  // namespace stepgraph::cli
