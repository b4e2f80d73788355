// Measures the times of ops on a device. Nodes are timed by events around each of them, in steps that are issued node
// by node. Other steps are captured, and their nodes follow each other more closely: so the cost of events is measured
// too, and subtracted.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/graph/without_nodes.hpp"
#include "engine/look/op_times.hpp"
#include "engine/run/device.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/plan/offload_plan.hpp"
#include "graphs/predict/trials.hpp"
#include "graphs/train/trainer.hpp"
#include "ops/transfers/clear.hpp"

namespace stepgraph::trials {
namespace {

using Clock   = std::chrono::steady_clock;
using Samples = std::map<Key, std::vector<double>>;

constexpr std::string_view hold_name = "hold";

// The size of a model and of a microbatch.
struct Size {
  bool llama = false;
  std::int64_t width, heads, vocab;
  int sequences, seq;
  int layers = 1;
};

// Widths of usual models. Large weights take long to set, so most vocabularies are small: a product has times of its
// own, whatever it is for.
std::vector<Size> sizes_of(DType type, bool small) {
  if (small) return {{false, 64, 4, 256, 2, 32}, {true, 64, 4, 256, 2, 32}};
  if (type == DType::f32)
    return {{false, 768, 12, 8192, 4, 1024}, {false, 2048, 16, 8192, 4, 1024}, {true, 1024, 16, 8192, 4, 1024}};
  return {{false, 768, 12, 50304, 8, 1024},  {false, 1536, 24, 50304, 8, 1024}, {false, 2048, 16, 8192, 2, 1024},
          {false, 3072, 32, 32768, 4, 1024}, {true, 1024, 16, 8192, 4, 1024},   {true, 4096, 32, 8192, 2, 2048}};
}
// Two models whose difference is layers with short nodes.
Size short_nodes(bool small, int layers) {
  return small ? Size{false, 64, 4, 256, 2, 32, layers} : Size{false, 768, 12, 4096, 4, 512, layers};
}

Trial trial_of(const Size& size, DType type) {
  const Model model = size.llama ? llama({.layers  = size.layers,
                                          .width   = size.width,
                                          .heads   = size.heads,
                                          .context = size.seq,
                                          .vocab   = size.vocab})
                                 : gpt2({.layers  = size.layers,
                                         .width   = size.width,
                                         .heads   = size.heads,
                                         .context = size.seq,
                                         .vocab   = size.vocab});
  Plan plan;
  plan.precision.param = type;
  plan.optimizer.lr    = 1e-6;  // many steps must not make numbers that are not finite
  return {model, plan, {.global = size.sequences, .micro = size.sequences, .seq = size.seq}};
}

// The step, behind nodes that keep the device busy while the host issues it: else the time of a short node would be
// that of its issue.
Graph held(const Graph& graph, bool small) {
  const std::int64_t bytes = small ? 1 << 16 : std::int64_t{1} << 29;
  const int times          = small ? 1 : 20;
  Graph made               = without_nodes(graph);
  const Buffer cleared     = made.buffer({.name = std::string(hold_name), .size_bytes = bytes});
  for (int i = 0; i < times; ++i)
    clear(made, {.name = std::string(hold_name), .lane = LaneKind::compute, .values = cleared});
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) made.add(graph.spec(Node{i}), graph.body(Node{i}));
  return made;
}

struct StepTimes {
  double step_s  = 0;  // captured, from the start to the end
  double nodes_s = 0;  // of all nodes together, recorded
  int num_nodes  = 0;
};

class DeviceCalibrator {
 public:
  DeviceCalibrator(World& world, const CalibrateOptions& options, int threads)
      : world_(world), options_(options), threads_(threads) {}

  StepTimes run(const Size& size, DType type) {
    const auto began  = Clock::now();
    const Trial trial = trial_of(size, type);
    Trainer trainer(
        trial.model, trial.plan, trial.batch, world_,
        {.threads = threads_, .change = [this](const Graph& graph) { return held(graph, options_.small); }});
    set_some_weights(trainer.run());
    const std::vector<std::int32_t> tokens = some_tokens(trial);
    for (int i = 0; i < 2; ++i) (void)trainer.step(tokens);  // libraries choose kernels, then the step is captured
    const double made_s = since(began);
    // Devices under load have lower clocks than devices that begin.
    StepTimes times{.step_s = steps(trainer, tokens, options_.small ? 0 : 0.15)};
    Recorder recorder;
    std::vector<double> sums;
    for (int i = 0; i <= options_.steps; ++i) {
      (void)steps(trainer, tokens, options_.small ? 0 : 0.04);
      (void)trainer.step(tokens, &recorder);
      if (i == 0) continue;  // makes events
      sums.push_back(look_at(trainer.run().step().graph, recorder.timeline(), type));
    }
    times.nodes_s   = quantile(sums, 0.5);
    times.num_nodes = static_cast<int>(trainer.run().step().graph.num_nodes());
    tell(str(size.llama ? "llama" : "gpt2", ", layers ", size.layers, ", width ", size.width, ", vocabulary ",
             size.vocab, ", ", size.sequences, " x ", size.seq, " tokens, ", type, ": step ", ms(times.step_s),
             " ms, nodes ", ms(times.nodes_s), " ms in ", times.num_nodes, "; set-up ", ms(made_s), " ms, all ",
             ms(since(began)), " ms"));
    return times;
  }

  // What a pair of events adds to the time of a node: the same nodes, recorded and captured. What a step costs besides
  // is in both models, and cancels.
  void measure_overhead() {
    const StepTimes one = run(short_nodes(options_.small, 1), DType::bf16);
    const StepTimes all = run(short_nodes(options_.small, 5), DType::bf16);
    const double found  = ((all.nodes_s - one.nodes_s) - (all.step_s - one.step_s)) / (all.num_nodes - one.num_nodes);
    event_s_            = std::clamp(found, -10e-6, 10e-6);
    tell(str("a node of a recorded step takes ", std::round(found * 1e8) / 100, " us longer than of a captured one"));
  }

  // Models that do not fit the device are left out, and so are the last ones if the device is slow.
  void measure_ops() {
    for (const DType type : {DType::bf16, DType::f32}) {
      const double until_s = type == DType::bf16 ? 35 : 45;
      for (const Size& size : sizes_of(type, options_.small)) {
        if (samples_.contains(type) && since(began_) > until_s) {
          tell(str("width ", size.width, " in ", type, " is left out: the device is slow"));
          continue;
        }
        try {
          (void)run(size, type);
        } catch (const Error& error) {
          if (error.kind() != ErrorKind::backend || !samples_.contains(DType::bf16)) throw;
          tell(str("width ", size.width, " in ", type, " is left out: ", error.what()));
        }
      }
    }
  }

  [[nodiscard]] Calibration result() const {
    Calibration out{.host            = host_name(),
                    .host_bytes      = machine_memory_bytes(),
                    .device          = options_.device,
                    .device_bytes    = device_memory_bytes(world_),
                    .cores           = num_cores(),
                    .threads         = threads_,
                    .node_overhead_s = std::max(0.0, -event_s_)};
    for (const DType type : {DType::bf16, DType::f32}) {
      Calibration::Ops& ops = type == DType::f32 ? out.ops : out.ops_bf16;
      const auto measured   = samples_.find(type);
      if (measured == samples_.end()) continue;
      for (const auto& [key, samples] : measured->second) {
        const double seconds = quantile(samples, 0.35);  // below the median: other programs only make it slower
        const double used    = std::max(seconds - std::max(0.0, event_s_), seconds / 4);
        ops[std::get<0>(key)].push_back({std::get<1>(key), std::get<2>(key), used, used});
      }
    }
    return out;
  }

  void tell(const std::string& line) const {
    if (options_.tell) options_.tell(line);
  }

 private:
  static double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }
  static double ms(double seconds) { return std::round(seconds * 1e6) / 1e3; }

  // Runs steps for so long, at least two. Returns the median of their times.
  static double steps(Trainer& trainer, const std::vector<std::int32_t>& tokens, double seconds) {
    const auto began = Clock::now();
    std::vector<double> each;
    while (each.size() < 2 || since(began) < seconds) {
      const auto now = Clock::now();
      (void)trainer.step(tokens);
      each.push_back(since(now));
    }
    return quantile(each, 0.5);
  }

  double look_at(const Graph& graph, const Timeline& timeline, DType type) {
    double sum = 0;
    for (const TaskTime& task : task_times(graph, timeline, 1)) {
      sum += task.seconds();
      if (graph.op(task.node).empty() || task.seconds() <= 0 || graph.name(task.node) == hold_name) continue;
      std::string op(graph.op(task.node));
      if (graph.kind(task.node) == NodeKind::host) op += "@host";
      samples_[type][{std::move(op), task.flops, task.bytes_moved}].push_back(task.seconds());
    }
    return sum;
  }

  World& world_;
  const CalibrateOptions& options_;
  int threads_;
  std::map<DType, Samples> samples_;
  Clock::time_point began_ = Clock::now();
  double event_s_          = 0;
};

}  // namespace

Calibration calibrate_device(const MakeWorld& make_world, const CalibrateOptions& options, int threads) {
  const std::unique_ptr<World> world = make_world(1);
  DeviceCalibrator calibrator(*world, options, threads);
  calibrator.measure_overhead();
  calibrator.measure_ops();
  Calibration out = calibrator.result();
  Transfers found = measure_transfers(*world, options, threads);
  out.ops.merge(found.ops);
  out.ops_bf16.merge(found.ops_bf16);
  out.beside = std::move(found.beside);
  fit_to_offloaded_step(*world, options, threads, out);
  return out;
}

}  // namespace stepgraph::trials
