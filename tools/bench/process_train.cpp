#include "tools/bench/process_train.hpp"

#include <iomanip>
#include <memory>
#include <optional>
#include <sstream>

#include "backends/init_world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/run/peers.hpp"
#include "engine/run/recorder.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/predict/step_report.hpp"
#include "tools/stepgraph/output.hpp"

namespace stepgraph::bench {
namespace {

void check_size(const TrainingCase& what, const World& world) {
  const int ranks = Layout(what.plan.layout).num_ranks();
  if (ranks == world.num_ranks()) return;
  throw Error(ErrorKind::config, str("layout '", what.layout, "': has ", ranks, " ranks, but the job has ",
                                     world.num_ranks(), " processes (as many)"));
}

struct Measured {
  std::vector<double> seconds, loopback_seconds;
  StepFigures figures;
};

Measured measure(const TrainingCase& what, const TrainOptions& options, ProcessWorld& world) {
  const bool is_first = world.peers()->process() == 0;
  const int steps     = options.dry_run ? 1 : options.steps;
  Training training(what, options.threads, world);
  std::optional<Training> loopback;
  if (is_first) loopback.emplace(what, options.threads * world.num_ranks());
  Measured out;
  for (int i = options.dry_run ? 0 : -2; i < steps; ++i) {  // negative: warm-up
    world.peers()->barrier("bench");
    const double seconds = training.step();
    world.peers()->barrier("bench");
    const double reference = loopback ? loopback->step() : 0;
    if (i < 0) continue;
    out.seconds.push_back(seconds);
    out.loopback_seconds.push_back(reference);
  }
  loopback.reset();
  Recorder recorder;
  world.peers()->barrier("bench");
  training.step(&recorder);
  out.figures = step_figures(training.run(), recorder.timeline());
  return out;
}

void print(const TrainingCase& what, const Measured& measured, const TrainOptions& options, const World& world) {
  const double step_s       = quantile(measured.seconds, 0.5);
  const double ratio        = quantile(measured.loopback_seconds, 0.5) / step_s;
  const double tokens_per_s = static_cast<double>(what.tokens()) / step_s;
  const double efficiency   = measured.figures.efficiency;
  if (options.json) {
    return cli::print_line(json_line({{"type", "train"},
                                      {"model", what.model},
                                      {"layout", what.layout},
                                      {"shard", to_string(what.plan.shard.strategy)},
                                      {"backend", options.backend},
                                      {"processes", world.num_ranks()},
                                      {"threads", options.threads},
                                      {"global_batch", what.batch.global},
                                      {"micro_batch", what.batch.micro},
                                      {"steps", measured.seconds.size()},
                                      {"tokens_per_s", tokens_per_s},
                                      {"step_s", step_s},
                                      {"step_p95_s", quantile(measured.seconds, 0.95)},
                                      {"gflops", tokens_per_s * what.flops_per_token() / 1e9},
                                      {"ratio_to_loopback", ratio},
                                      {"pipeline_efficiency", efficiency},
                                      {"hidden", measured.figures.hidden}}));
  }
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << what.model << ' ' << what.layout
      << (what.plan.shard.strategy == Shard::none ? "" : str(" ", to_string(what.plan.shard.strategy))) << " over "
      << options.backend << ": " << tokens_per_s << " tokens/s, a step " << 1e3 * step_s << " ms (p95 "
      << 1e3 * quantile(measured.seconds, 0.95) << "); " << std::setprecision(3) << ratio
      << " of loopback's speed with as many threads; " << std::setprecision(1) << 100 * measured.figures.hidden
      << "% of the communication hidden";
  if (what.plan.layout.pp > 1) out << "; efficiency of the pipeline " << 100 * efficiency << "% (simulated)";
  cli::print_line(out.str());
}

}  // namespace

void process_train(const std::vector<TrainingCase>& cases, const TrainOptions& options) {
  const std::unique_ptr<ProcessWorld> world = init_world(options.backend);
  try {
    for (const TrainingCase& what : cases) check_size(what, *world);
    for (const TrainingCase& what : cases) {
      const Measured measured = measure(what, options, *world);
      if (world->peers()->process() == 0) print(what, measured, options, *world);
    }
  } catch (const std::exception& error) {
    if (!world->fail(error.what())) throw cli::Exit{3};  // another process has, which is printed
    throw;
  }
  if (!world->end()) throw cli::Exit{3};
}

}  // namespace stepgraph::bench
