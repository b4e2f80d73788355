// Trains a small network on 8 ranks in one process, with its weights sharded over all ranks, from a hand-written graph
// (tools/examples/sharded_step.cpp). Verifies and draws the graph, then runs it a few hundred times. `tools/demo` runs
// it.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iomanip>
#include <iostream>
#include <string>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/draw/dot.hpp"
#include "engine/graph/edges.hpp"
#include "engine/look/summary.hpp"
#include "engine/look/trace.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/recorder.hpp"
#include "engine/simulate/machine.hpp"
#include "engine/simulate/simulate.hpp"
#include "engine/verify/verify.hpp"
#include "tools/examples/sharded_step.hpp"
#include "tools/stepgraph/command_line.hpp"

namespace sg = stepgraph;

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Pairs of a gather and another layer's computation on one rank without an order between them: they may overlap.
int overlapping_pairs(const sg::ShardedStep& step) {
  int pairs = 0;
  for (std::size_t gathered = 0; gathered < step.gathers[0].size(); ++gathered) {
    for (std::size_t layer = 0; layer < step.forwards[0].size(); ++layer) {
      const sg::Node gather = step.gathers[0][gathered], forward = step.forwards[0][layer];
      if (!sg::reaches(step.graph, gather, forward) && !sg::reaches(step.graph, forward, gather)) ++pairs;
    }
  }
  return pairs;
}

class ProgressBar {
 public:
  explicit ProgressBar(int steps) : steps_(steps), shown_(isatty(STDERR_FILENO) != 0) {}
  void show(int step, double loss) const {
    if (!shown_ || (step % 5 != 0 && step != steps_)) return;
    constexpr int width = 40;
    const int filled    = width * step / steps_;
    const double left   = seconds_since(start_) / step * (steps_ - step);
    std::fprintf(stderr, "\r  [%s%s] step %d/%d  loss %.6f  %.1f s left ",
                 std::string(static_cast<std::size_t>(filled), '#').c_str(),
                 std::string(static_cast<std::size_t>(width - filled), '.').c_str(), step, steps_, loss, left);
    if (step == steps_) std::fputc('\n', stderr);
  }

 private:
  int steps_;
  bool shown_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

struct Pictures {
  std::string svg = {}, all_ranks_svg = {}, dot = {}, trace = {};  // empty: not drawn
};

const std::string title = "One training step, weights sharded over all ranks";

void draw(const sg::Graph& graph, const Pictures& pictures) {
  const sg::DotOptions all{.detail = sg::Detail::op, .title = title};
  if (!pictures.svg.empty())
    sg::write_svg(graph, pictures.svg, {.detail = all.detail, .rank = sg::Rank{0}, .title = title + ": rank 0"});
  if (!pictures.all_ranks_svg.empty()) sg::write_svg(graph, pictures.all_ranks_svg, all);
  if (!pictures.dot.empty()) sg::write_dot(graph, pictures.dot, all);
}

void train(const sg::ShardedStepSpec& spec, int steps, int threads, const Pictures& pictures) {
  const auto built            = std::chrono::steady_clock::now();
  const sg::ShardedStep step  = sg::sharded_step(spec);
  const std::size_t num_edges = step.graph.edges().preds.size();
  const double build_seconds  = seconds_since(built);
  sg::LoopbackWorld world(spec.ranks);
  const sg::RunnableGraph runnable(step.graph, world, {.reuse = sg::Reuse::tight});
  const sg::MemoryPlan& plan = *runnable.memory();
  const sg::ArenaPlan arena  = plan.arena(sg::Rank{0});
  const auto verified        = std::chrono::steady_clock::now();
  sg::verify(runnable);
  std::cout << "graph     " << step.graph.num_nodes() << " nodes, " << num_edges << " edges on " << spec.ranks
            << " ranks, built in " << std::fixed << std::setprecision(2) << build_seconds * 1e3 << " ms\n"
            << "verified  no race, no deadlock, in one step and around the loop (" << seconds_since(verified) * 1e3
            << " ms)\n"
            << "memory    " << arena.size_bytes << " bytes on rank 0, " << arena.persistent_bytes
            << " of them persistent; " << arena.lower_bound << " are live at the same time; " << plan.num_reuse_edges()
            << " edges added\n"
            << "overlap   " << overlapping_pairs(step)
            << " pairs of a weight gather and another layer's forward pass may run side by side on each rank ("
            << spec.slots << " slots)\n";
  draw(step.graph, pictures);

  // The same graph on a simulated cluster, where messages take time and devices are fast.
  const sg::Machine cluster   = sg::two_level_machine({.ranks          = spec.ranks,
                                                       .ranks_per_node = std::max(1, spec.ranks / 2),
                                                       .inside         = {1e-6, 100e9},
                                                       .between        = {5e-6, 25e9},
                                                       .rates          = {.compute = {.flops_per_s = 50e9}}});
  const sg::Summary predicted = sg::summarize(runnable, sg::simulate(runnable, cluster));
  std::cout << "predicted on a cluster of two nodes: " << predicted.makespan_s * 1e6 << " us a step, "
            << 100 * predicted.hidden_in_all.share() << "% of the communication hidden behind compute\n";

  sg::Executor executor({.threads = threads});
  const sg::Program program(runnable, world);
  sg::fill(step, program.memory(), 1);
  const auto loss = [&] { return program.memory().span<float>(step.loss[0])[0]; };
  const ProgressBar bar(steps);
  const auto started = std::chrono::steady_clock::now();
  float first        = 0;
  sg::Recorder recorder;
  for (int i = 1; i <= steps; ++i) {
    executor.run(program, i == steps ? &recorder : nullptr);
    if (i == 1) first = loss();
    bar.show(i, static_cast<double>(loss()));
  }
  std::cout << "trained   " << steps << " steps of " << program.num_tasks() << " tasks on " << executor.threads()
            << " threads in " << seconds_since(started) << " s: loss " << std::setprecision(6) << first << " -> "
            << loss() << "\n";
  const sg::Timeline timeline = recorder.timeline();
  std::cout << "\nthe last step, measured (all ranks share this machine's cores and a message is a copy of a few KiB, "
               "so there\n"
               "is almost no communication to hide):\n"
            << sg::summarize(runnable, timeline) << std::flush;
  if (!pictures.trace.empty()) {
    sg::write_trace(runnable, timeline, pictures.trace, {.title = title + ": the last step, measured"});
  }
  if (steps >= 200 && !(loss() < 0.5f * first))
    throw sg::Error(sg::ErrorKind::run, "the loss did not fall to half of its first value");
}

}  // namespace

int main(int argc, char** argv) {
  sg::ShardedStepSpec spec;
  int steps = 300, threads = 0;
  Pictures pictures;
  sg::cli::CommandLine line("sharded_training",
                            "Trains a small network from a hand-written step graph, all ranks in this process.");
  sg::cli::Command command = line.command();
  command.option("--ranks", spec.ranks, "Ranks");
  command.option("--layers", spec.layers, "Layers");
  command.option("--slots", spec.slots, "Gathered layers in memory at the same time");
  command.option("--steps", steps, "Steps to train").between(1, 1'000'000);
  command.option("--threads", threads, "Threads; 0: all cores");
  command.option("--svg", pictures.svg, "Draw the graph of one rank to this file");
  command.option("--all-ranks-svg", pictures.all_ranks_svg, "Draw all ranks to this file");
  command.option("--dot", pictures.dot, "Write the whole graph in DOT to this file");
  command.option("--trace", pictures.trace, "Write the times of the last step, for ui.perfetto.dev, to this file");
  command.footer("Example: sharded_training --steps 100 --svg step.svg");
  command.run([&] { train(spec, steps, threads, pictures); });
  try {
    line.run(argc, argv);
    return 0;
  } catch (const sg::cli::UsageError& error) {
    std::cerr << error.what() << "\n";
    return 2;
  } catch (const sg::Error& error) {
    std::cerr << "sharded_training: " << error.what() << "\n";
    return error.kind() == sg::ErrorKind::config ? 2 : error.kind() == sg::ErrorKind::backend ? 3 : 1;
  }
}
