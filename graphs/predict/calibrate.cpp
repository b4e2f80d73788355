// Measures the times of ops in training steps.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/look/op_times.hpp"
#include "engine/run/recorder.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/plan/offload_plan.hpp"
#include "graphs/predict/trials.hpp"
#include "graphs/train/trainer.hpp"

namespace stepgraph {
namespace {

using trials::Key;
using trials::Trial;
using trials::undisturbed;

// The size of a model. Layers are alike, so one layer is enough.
struct Size {
  std::int64_t width, heads, seq, vocab;
  int sequences;  // of a microbatch
};

Model gpt2_of(const Size& size, int layers = 1) {
  return gpt2({.layers = layers, .width = size.width, .heads = size.heads, .context = size.seq, .vocab = size.vocab});
}

// With as many ranks as threads, every thread is busy with a rank's own nodes. With one rank, all threads share its
// nodes. Large models are measured at fewer sizes: they take most of the time.
std::vector<Trial> trials_of(int threads, bool small) {
  const Size tiny{64, 4, 64, 512, 4}, middle{256, 8, 128, 4096, 8}, large{512, 8, 256, 2048, 4};
  const int ranks = std::clamp(threads, 1, 16), pairs = std::max(1, ranks / 2);
  std::vector<Trial> all;
  const auto add = [&](const Model& model, const Plan& plan, const Size& size, int part = 1, int microbatches = 1) {
    const int sequences = size.sequences / part;
    all.push_back(
        {model,
         plan,
         {.global = plan.layout.dp * sequences * microbatches, .micro = sequences, .seq = static_cast<int>(size.seq)}});
  };
  for (const Size& size : small ? std::vector{tiny} : std::vector{tiny, middle, large}) {
    const bool is_large = size.width >= large.width;
    const Model model   = gpt2_of(size);
    // A small vocabulary is enough to measure the ops that only the other family has.
    const Model other =
        llama({.layers = 1, .width = size.width, .heads = size.heads, .context = size.seq, .vocab = 256});
    add(model, {}, size);
    add(model, {}, size, 2);
    add(other, {}, size, is_large ? 2 : 1);
    if (!is_large) add(gpt2_of(size, 2), {.layout = {.pp = 2}}, size, 1, 2);
    if (ranks == 1) continue;
    const Plan replicas{.layout = {.dp = ranks}};
    add(model, replicas, size, 2);
    add(model, {.layout = {.dp = pairs, .tp = 2}}, size);
    if (is_large) continue;
    add(model, replicas, size);
    add(other, replicas, size);
    add(model, {.layout = {.dp = pairs, .tp = 2, .sequence_parallel = true}}, size);
    add(model, {.layout = {.dp = ranks}, .shard = {.strategy = Shard::full}}, size);
  }
  // In bf16: layouts that have all ops, of models that are not large.
  const std::size_t num_f32 = all.size();
  for (std::size_t i = 0; i < num_f32; ++i) {
    if (all[i].model.width >= large.width) continue;
    all.push_back(all[i]);
    all.back().plan.precision.param = DType::bf16;
  }
  return all;
}

// States on disk, in pieces of several sizes: the staging ring takes a quarter of the host memory.
std::vector<Trial> disk_trials(const std::string& folder, bool small) {
  const Size tiny{64, 4, 64, 512, 4}, middle{256, 8, 128, 4096, 2}, large{512, 8, 128, 2048, 2};
  std::vector<Trial> all;
  for (const Size& size : small ? std::vector{tiny} : std::vector{tiny, middle, large}) {
    const std::int64_t states = 8 * gpt2_of(size).parameters().num_elements();
    Plan plan;
    plan.offload = {.optimizer = true, .host_bytes = std::max<std::int64_t>(states / 2, 64 << 10), .disk = folder};
    all.push_back(
        {gpt2_of(size), plan, {.global = size.sequences, .micro = size.sequences, .seq = static_cast<int>(size.seq)}});
  }
  return all;
}

struct Sample {
  double others_share;
  double seconds;
};
using Samples = std::map<Key, std::vector<Sample>>;

double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

// A measurement with few, or with many, other threads busy: two points of a line.
struct End {
  double others_share;
  double seconds;
};
std::optional<End> end_of(const std::vector<Sample>& samples, bool busy) {
  std::vector<double> shares, seconds;
  for (const Sample& sample : samples) {
    if (busy ? sample.others_share < 0.65 : sample.others_share > 0.35) continue;
    shares.push_back(sample.others_share);
    seconds.push_back(sample.seconds);
  }
  if (shares.empty()) return std::nullopt;
  return End{median(shares), quantile(seconds, undisturbed)};
}

// Speed falls linearly with the share of busy threads (engine/simulate/machine.hpp): the line through both
// measurements, evaluated at 0 and at 1 and kept above 0.
RatePoint between(const Key& key, const End& alone, const End& busy) {
  const double slope = (1 / busy.seconds - 1 / alone.seconds) / (busy.others_share - alone.others_share);
  const auto speed   = [&](double share) {
    const double found = 1 / alone.seconds + slope * (share - alone.others_share);
    return std::max(found, 0.5 / std::max(alone.seconds, busy.seconds));
  };
  return {std::get<1>(key), std::get<2>(key), 1 / speed(1), 1 / speed(0)};
}

class Calibrator {
 public:
  Calibrator(const MakeWorld& make_world, const CalibrateOptions& options, int threads)
      : make_world_(make_world), options_(options), threads_(threads) {}

  void run(const Trial& trial) {
    const auto world = make_world_(Layout(trial.plan.layout).num_ranks());
    Trainer trainer(trial.model, trial.plan, trial.batch, *world, {.threads = threads_, .storage = options_.storage});
    trials::set_some_weights(trainer.run());
    const std::vector<std::int32_t> tokens = trials::some_tokens(trial);
    Recorder recorder;
    (void)trainer.step(tokens);  // warm-up: first touch of memory
    for (int step = 0; step < options_.steps; ++step) {
      (void)trainer.step(tokens, &recorder);
      look_at(trainer.run().step().graph, recorder.timeline(), trial.plan);
    }
  }

  void run_on_disk() {
    for (const Trial& trial : disk_trials(options_.disk, options_.small)) run(trial);
    disk_ = std::filesystem::weakly_canonical(options_.disk).string();
  }

  [[nodiscard]] Calibration result() const {
    Calibration out{.host            = host_name(),
                    .host_bytes      = machine_memory_bytes(),
                    .disk            = disk_,
                    .cores           = num_cores(),
                    .threads         = threads_,
                    .node_overhead_s = gaps_.empty() ? 0 : median(gaps_)};
    add_ops(samples_, out.ops);
    add_ops(samples_bf16_, out.ops_bf16);
    return out;
  }

 private:
  static void add_ops(const Samples& all, Calibration::Ops& ops) {
    // Where an op of some size has one measurement only, the other follows from the op's median ratio.
    std::map<std::string, std::vector<double>> ratios;
    for (const auto& [key, samples] : all) {
      const auto alone = end_of(samples, false), busy = end_of(samples, true);
      if (!alone || !busy) continue;
      const RatePoint point = between(key, *alone, *busy);
      ratios[std::get<0>(key)].push_back(point.busy_s / point.alone_s);
    }
    for (const auto& [key, samples] : all) {
      const auto alone = end_of(samples, false), busy = end_of(samples, true);
      RatePoint point{std::get<1>(key), std::get<2>(key), 0, 0};
      if (alone && busy) {
        point = between(key, *alone, *busy);
      } else if (alone || busy) {
        const auto usual   = ratios.find(std::get<0>(key));
        const double ratio = usual != ratios.end() ? median(usual->second) : 1;
        point.busy_s       = busy ? busy->seconds : alone->seconds * ratio;
        point.alone_s      = alone ? alone->seconds : busy->seconds / ratio;
      } else {
        std::vector<double> seconds;
        for (const Sample& sample : samples) seconds.push_back(sample.seconds);
        point.busy_s = point.alone_s = quantile(seconds, undisturbed);
      }
      if (point.busy_s > 0 && point.alone_s > 0) ops[std::get<0>(key)].push_back(point);
    }
  }

  void look_at(const Graph& graph, const Timeline& timeline, const Plan& plan) {
    Samples& samples    = plan.precision.param == DType::f32 ? samples_ : samples_bf16_;
    const bool one_rank = plan == Plan{};
    std::map<std::uint32_t, double> lane_ends;  // by position on the compute lane
    for (const TaskTime& task : task_times(graph, timeline, threads_)) {
      if (!graph.op(task.node).empty() && task.seconds() > 0) {
        samples[{std::string(graph.op(task.node)), task.flops, task.bytes_moved}].push_back(
            {task.others_share, task.seconds()});
      }
      if (!one_rank || graph.lane(task.node) != graph.lane(Rank{0}, LaneKind::compute)) continue;
      const std::uint32_t position = graph.lane_position(task.node);
      const auto before            = lane_ends.find(position - 1);
      if (before != lane_ends.end()) gaps_.push_back(std::max(0.0, task.begin_s - before->second));
      lane_ends.emplace(position, task.end_s);
    }
  }

  const MakeWorld& make_world_;
  const CalibrateOptions& options_;
  int threads_;
  std::string disk_;
  Samples samples_, samples_bf16_;
  std::vector<double> gaps_;
};

}  // namespace

Calibration calibrate(const MakeWorld& make_world, const CalibrateOptions& options) {
  if (options.threads < 0 || options.steps < 1) {
    throw Error(ErrorKind::config, str("calibrate: ", options.threads, " threads and ", options.steps,
                                       " steps (threads of at least 0, steps of at least 1)"));
  }
  const int threads = options.threads > 0 ? options.threads : num_cores();
  if (!options.device.empty()) return trials::calibrate_device(make_world, options, threads);
  Calibrator calibrator(make_world, options, threads);
  for (const Trial& trial : trials_of(threads, options.small)) calibrator.run(trial);
  if (!options.disk.empty()) calibrator.run_on_disk();
  return calibrator.result();
}

}  // namespace stepgraph
