// Measures copies and host updates inside of a step with offload. They are slower there than by themselves: the step
// uses more memory of the host, and the thread that issues nodes takes turns with the threads of an update.
#include <algorithm>
#include <array>
#include <cmath>

#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/look/analysis.hpp"
#include "engine/run/recorder.hpp"
#include "engine/run/streams.hpp"
#include "engine/simulate/simulate.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/predict/trials.hpp"
#include "graphs/train/trainer.hpp"

namespace stepgraph::trials {
namespace {

constexpr std::array lanes{LaneKind::h2d, LaneKind::d2h, LaneKind::host};
using LaneTimes = std::array<double, lanes.size()>;

LaneTimes lane_times(const Graph& graph, const Timeline& timeline) {
  LaneTimes sums{};
  for (const LaneBusy& busy : busy_lanes(graph, timeline)) {
    const auto found = std::find(lanes.begin(), lanes.end(), busy.lane);
    if (found != lanes.end()) sums[static_cast<std::size_t>(found - lanes.begin())] += busy.busy_s;
  }
  return sums;
}

std::string op_on(LaneKind lane) { return lane == LaneKind::host ? "adamw@host" : std::string(to_string(lane)); }

}  // namespace

void fit_to_offloaded_step(World& world, const CalibrateOptions& options, int threads, Calibration& calibration) {
  const bool small = options.small;
  Trial trial{gpt2({.layers  = small ? 2 : 8,
                    .width   = small ? 64 : 2048,
                    .heads   = small ? 4 : 16,
                    .context = small ? 32 : 1024,
                    .vocab   = small ? 256 : 8192}),
              {},
              {.global = 2, .micro = 2, .seq = small ? 32 : 1024}};
  trial.plan.precision.param   = DType::bf16;
  trial.plan.optimizer.lr      = 1e-6;
  trial.plan.offload.optimizer = true;
  Trainer trainer(trial.model, trial.plan, trial.batch, world,
                  {.threads = threads, .offload_rates = offload_rates(calibration)});
  set_some_weights(trainer.run());
  const std::vector<std::int32_t> tokens = some_tokens(trial);
  for (int i = 0; i < 3; ++i) (void)trainer.step(tokens);
  std::array<std::vector<double>, lanes.size()> measured;
  const Graph& graph = trainer.run().step().graph;
  for (int i = 0; i < options.steps; ++i) {
    Recorder recorder;
    (void)trainer.step(tokens, &recorder);
    const LaneTimes times = lane_times(graph, recorder.timeline());
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) measured[lane].push_back(times[lane]);
  }
  const Edges edges = stream_edges(graph, trainer.run().plan());
  const LaneTimes simulated =
      lane_times(graph, simulate({graph, edges}, calibrated_machine(calibration, 1, DType::bf16)));
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
    if (simulated[lane] <= 0) continue;
    const double factor = std::clamp(quantile(measured[lane], 0.5) / simulated[lane], 1.0, 2.0);
    if (options.tell)
      options.tell(
          str(lanes[lane], " in a step with offload: ", std::round(100 * factor) / 100, " times as long as by itself"));
    for (Calibration::Ops* const ops : {&calibration.ops, &calibration.ops_bf16}) {
      const auto found = ops->find(op_on(lanes[lane]));
      if (found == ops->end()) continue;
      for (RatePoint& point : found->second) {
        point.busy_s *= factor;
        point.alone_s *= factor;
        point.paired_s *= factor;
        point.halved_s *= factor;
      }
    }
  }
}

}  // namespace stepgraph::trials
