#include "tools/bench/training/processes.hpp"

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
#include "tools/bench/machine/sgemm_peak.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {
namespace {

void check_size(const TrainingCase& what, const World& world) {
  const int ranks = Layout(what.plan.layout).num_ranks();
  if (ranks == world.num_ranks()) return;
  throw Error(ErrorKind::config, str("layout '", what.layout, "': has ", ranks, " ranks, but the job has ",
                                     world.num_ranks(), " processes (as many)"));
}

bool is_on_gpus(const TrainOptions& options) { return options.backend == "nccl"; }

struct Measured {
  std::vector<double> seconds, loopback_seconds;     // on GPUs there is no loopback to compare with
  std::int64_t peak_bytes = 0, workspace_bytes = 0;  // planned, of this process
  StepFigures figures;
};

Measured measure(const TrainingCase& what, const TrainOptions& options, ProcessWorld& world) {
  const bool is_first = world.peers()->process() == 0;
  const int steps     = options.dry_run ? 1 : options.steps;
  Training training(what, options.threads, world);
  std::optional<Training> loopback;
  if (is_first && !is_on_gpus(options)) loopback.emplace(what, options.threads * world.num_ranks());
  Measured out;
  const MemoryPlan& plan = training.run().plan();
  for (const Rank rank : world.local_ranks()) {
    out.peak_bytes += plan.device_bytes(rank);
    out.workspace_bytes += plan.workspace_bytes(rank);
  }
  for (int i = options.dry_run ? 0 : -options.warm_up; i < steps; ++i) {  // negative: warm-up
    world.peers()->barrier("bench");
    const double seconds = training.step();
    world.peers()->barrier("bench");
    const double loopback_seconds = loopback ? loopback->step() : 0;
    if (i < 0) continue;
    out.seconds.push_back(seconds);
    if (loopback) out.loopback_seconds.push_back(loopback_seconds);
  }
  loopback.reset();
  Recorder recorder;
  world.peers()->barrier("bench");
  training.step(&recorder);
  out.figures = step_figures(training.run(), recorder.timeline());
  return out;
}

void print(const TrainingCase& what, const Measured& measured, const TrainOptions& options, const World& world,
           double peak_gflops) {
  const double step_s       = quantile(measured.seconds, 0.5);
  const double ratio        = measured.loopback_seconds.empty() ? 0 : quantile(measured.loopback_seconds, 0.5) / step_s;
  const double tokens_per_s = static_cast<double>(what.tokens()) / step_s;
  const double gflops       = tokens_per_s * what.flops_per_token() / 1e9;
  const double efficiency   = measured.figures.efficiency;
  if (options.json) {
    JsonValue line{{"type", "train"},
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
                   {"gflops", gflops},
                   {"peak_gflops", peak_gflops},
                   {"share_of_peak", gflops / peak_gflops},
                   {"peak_bytes", measured.peak_bytes},
                   {"workspace_bytes", measured.workspace_bytes},
                   {"pipeline_efficiency", efficiency},
                   {"hidden", measured.figures.hidden}};
    if (!measured.loopback_seconds.empty()) line.add({{"ratio_to_loopback", ratio}});
    return cli::print_line(json_line(line));
  }
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << what.model << ' ' << what.layout
      << (what.plan.shard.strategy == Shard::none ? "" : str(" ", to_string(what.plan.shard.strategy))) << " over "
      << options.backend << ": " << tokens_per_s << " tokens/s, a step " << 1e3 * step_s << " ms (p95 "
      << 1e3 * quantile(measured.seconds, 0.95) << "), " << 100 * gflops / peak_gflops << "% of "
      << (is_on_gpus(options) ? "the best product" : "sgemm in all processes") << "; ";
  if (!measured.loopback_seconds.empty())
    out << std::setprecision(3) << ratio << " of loopback's speed with as many threads; ";
  out << std::setprecision(1) << 100 * measured.figures.hidden << "% of the communication hidden";
  if (what.plan.layout.pp > 1) out << "; efficiency of the pipeline " << 100 * efficiency << "% (simulated)";
  cli::print_line(out.str());
}

// Of processes on this machine: those on CPUs share its cores. GPUs: that of the first one, as processes may share it.
double peak(const std::vector<TrainingCase>& cases, const TrainOptions& options, int num_processes) {
  const DType type = cases.front().plan.precision.param;
  if (is_on_gpus(options))
    return product_peak(options.devices.empty() ? 0 : options.devices.front(), type, options.dry_run ? 256 : 8192, 10);
  return sgemm_peak(options.threads * num_processes, options.dry_run ? std::vector<std::int64_t>{64} : peak_sizes(),
                    options.dry_run ? 1 : 5, type);
}

}  // namespace

void process_train(const std::vector<TrainingCase>& cases, const TrainOptions& options) {
  InitOptions init;
  init.nccl.devices                         = options.devices;
  init.nccl.exact                           = options.exact;
  const std::unique_ptr<ProcessWorld> world = init_world(options.backend, init);
  try {
    for (const TrainingCase& what : cases) check_size(what, *world);
    const double peak_gflops = world->peers()->process() == 0 ? peak(cases, options, world->num_ranks()) : 0;
    for (const TrainingCase& what : cases) {
      const Measured measured = measure(what, options, *world);
      if (world->peers()->process() == 0) print(what, measured, options, *world, peak_gflops);
    }
  } catch (const std::exception& error) {
    if (!world->fail(error.what())) throw cli::Exit{3};  // another process has, which is printed
    throw;
  }
  if (!world->end()) throw cli::Exit{3};
}

}  // namespace stepgraph::bench
