// Measures the times of ops in training steps.
#include <algorithm>
#include <filesystem>
#include <map>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/look/op_times.hpp"
#include "engine/run/recorder.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/plan/offload_plan.hpp"
#include "graphs/predict/rate_fit.hpp"
#include "graphs/predict/trials.hpp"
#include "graphs/train/trainer.hpp"

namespace stepgraph {
namespace {

using trials::NodeSamples;
using trials::Trial;

// The size of a model.
struct Size {
  std::int64_t width, heads, seq, vocab;
  int sequences;  // of a microbatch
};

Model gpt2_of(const Size& size, int layers = 1) {
  return gpt2({.layers = layers, .width = size.width, .heads = size.heads, .context = size.seq, .vocab = size.vocab});
}

// With as many ranks as threads, every thread is busy with a rank's own nodes; with half as many, each rank has a
// helper; with two ranks, each has half of the threads. With one, all threads share its nodes. Layers are alike, but
// one layer of one or two replicas could stay in the caches, so these have three, or two with microbatches. Three of a
// large model could stay in the caches of many cores, so from 8 threads on it has eight. One layer of the other family
// is enough for its own ops. Large models are measured at fewer sizes: they take most of the time.
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
    const int layers    = is_large && threads >= 8 ? 8 : 3;
    const auto model    = [&](int replicas) { return gpt2_of(size, replicas > 2 || small ? 1 : layers); };
    // A small vocabulary is enough to measure the ops that only the other family has.
    const Model other =
        llama({.layers = 1, .width = size.width, .heads = size.heads, .context = size.seq, .vocab = 256});
    add(model(1), {}, size);
    add(model(1), {}, size, 2);
    add(other, {}, size, is_large ? 2 : 1);
    add(gpt2_of(size, 2), {.layout = {.pp = 2}}, size, 1, 2);
    if (ranks == 1) continue;
    const Plan replicas{.layout = {.dp = ranks}};
    add(model(ranks), replicas, size, 2);
    add(model(1), {.layout = {.tp = 2}}, size);
    if (pairs > 1) {
      add(model(pairs), {.layout = {.dp = pairs, .tp = 2}}, size);
      add(model(pairs), {.layout = {.dp = pairs}}, size, 2);
      if (pairs > 3) {  // with tensor parallel ranks, as small microbatches as without
        add(model(pairs / 2), {.layout = {.dp = pairs / 2, .tp = 2}}, size);
        add(model(pairs / 2), {.layout = {.dp = pairs / 2, .tp = 2}}, size, 2);
      }
      if (pairs > 2) add(model(2), {.layout = {.dp = 2}}, size, 2);
    }
    if (is_large) continue;
    add(model(ranks), replicas, size);
    add(other, replicas, size);
    add(model(pairs), {.layout = {.dp = pairs, .tp = 2, .sequence_parallel = true}}, size);
    add(model(ranks), {.layout = {.dp = ranks}, .shard = {.strategy = Shard::full}}, size);
  }
  const std::size_t num_f32 = all.size();
  for (std::size_t i = 0; i < num_f32; ++i) {
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

double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

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
    const int others = std::max(1, threads_ - 1);
    out.ops          = trials::fitted_points(samples_, others);
    out.ops_bf16     = trials::fitted_points(samples_bf16_, others);
    return out;
  }

 private:
  void look_at(const Graph& graph, const Timeline& timeline, const Plan& plan) {
    NodeSamples& samples = plan.precision.param == DType::f32 ? samples_ : samples_bf16_;
    const bool one_rank  = plan == Plan{};
    std::map<std::uint32_t, double> lane_ends;  // by position on the compute lane
    for (const TaskTime& task : task_times(graph, timeline, threads_)) {
      if (!graph.op(task.node).empty() && task.seconds() > 0) {
        samples[{std::string(graph.op(task.node)), task.flops, task.bytes_moved}].push_back(
            {task.helped_share, task.seconds()});
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
  NodeSamples samples_, samples_bf16_;
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
