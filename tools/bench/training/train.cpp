#include "tools/bench/training/train.hpp"

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>

#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/look/op_times.hpp"
#include "engine/run/recorder.hpp"
#include "graphs/config/config.hpp"
#include "graphs/files/json_value.hpp"
#include "tools/bench/machine/floors.hpp"
#include "tools/bench/machine/sgemm_peak.hpp"
#include "tools/bench/training/processes.hpp"
#include "tools/bench/training/training.hpp"
#include "tools/bench/training/updates.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {
namespace {

// Resident memory of the process, after unused heap memory was returned to the system; 0: not known.
std::int64_t resident_bytes() {
  malloc_trim(0);
  std::int64_t all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Measured {
  std::vector<double> seconds, reference_seconds;
  std::vector<double> fma_gflops;   // before each step; empty on a GPU
  double cpu_share            = 0;  // processor time over the time of all threads, including the search for work
  std::int64_t resident_bytes = 0;  // growth of the process
  std::int64_t process_bytes  = 0;
  std::int64_t peak_bytes = 0, rank_peak_bytes = 0, lower_bound_bytes = 0, workspace_bytes = 0;  // planned
  std::vector<OpTime> ops;
};

Measured measure(const TrainingCase& what, const TrainOptions& options) {
  Measured out;
  const int steps = options.dry_run ? 1 : options.steps, warm_up = options.dry_run ? 1 : options.warm_up;
  const std::int64_t before = resident_bytes();
  Training training(what, options.threads, options.backend, options.devices);
  for (int i = 0; i < warm_up; ++i) training.step();
  out.process_bytes      = resident_bytes();
  out.resident_bytes     = out.process_bytes - before;
  const MemoryPlan& plan = training.run().plan();
  for (const ArenaPlan& arena : plan.arenas) {
    const std::int64_t workspace = arena.space == Space::device ? plan.workspace_bytes(arena.rank) : 0;
    out.peak_bytes += arena.size_bytes + workspace;
    out.lower_bound_bytes += arena.lower_bound + workspace;
    out.rank_peak_bytes = std::max(out.rank_peak_bytes, arena.size_bytes + workspace);
    out.workspace_bytes += workspace;
  }
  // Alternates with the same work on one rank, or without sharding, so that both run under the same conditions.
  std::unique_ptr<Training> reference;
  if (what.plan.shard.strategy != Shard::none) {
    reference = std::make_unique<Training>(what.not_sharded(), options.threads, options.backend, options.devices);
  } else if (what.layout != "1x1x1") {
    const std::vector<int> first(options.devices.begin(), options.devices.begin() + !options.devices.empty());
    reference = std::make_unique<Training>(what.on_one_rank(), options.threads, options.backend, first);
  }
  if (reference) reference->step();
  const bool on_cpu = options.backend != "cuda";
  double busy_s     = 0;
  for (int i = 0; i < steps; ++i) {
    if (on_cpu) out.fma_gflops.push_back(measure_fma_gflops(options.threads, options.dry_run));
    const double cpu_s = cpu_seconds();
    out.seconds.push_back(training.step());
    busy_s += cpu_seconds() - cpu_s;
    if (!reference) continue;
    if (on_cpu) (void)measure_fma_gflops(options.threads, options.dry_run);  // so that both begin in the same way
    out.reference_seconds.push_back(reference->step());
  }
  const double wall_s = std::accumulate(out.seconds.begin(), out.seconds.end(), 0.0);
  out.cpu_share       = busy_s / (wall_s * options.threads);
  Recorder recorder;
  training.step(&recorder);
  out.ops = op_times(training.run().step().graph, recorder.timeline());
  return out;
}

struct Line {
  const TrainingCase& what;
  const Measured& measured;
  double step_s, tokens_per_s, gflops, peak_gflops, ratio;
  const char* limit;             // the name of the peak
  std::optional<Floors> floors;  // of the CPU
  // Of a loop of multiply-adds that runs in turns with the steps, so that both find the machine at the same speed.
  std::optional<double> share_of_fma;
  [[nodiscard]] const char* reference() const {
    return what.plan.shard.strategy == Shard::none ? "ratio_to_1x1x1" : "ratio_to_dp";
  }
};

void print_json(const Line& line, const TrainOptions& options) {
  JsonValue json = {{"type", "train"},
                    {"model", line.what.model},
                    {"layout", line.what.layout},
                    {"shard", to_string(line.what.plan.shard.strategy)},
                    {"backend", options.backend},
                    {"threads", options.threads},
                    {"global_batch", line.what.batch.global},
                    {"micro_batch", line.what.batch.micro},
                    {"steps", line.measured.seconds.size()},
                    {"tokens_per_s", line.tokens_per_s},
                    {"step_s", line.step_s},
                    {"step_p95_s", quantile(line.measured.seconds, 0.95)},
                    {"flops_per_token", line.what.flops_per_token()},
                    {"gflops", line.gflops},
                    {"peak_gflops", line.peak_gflops},
                    {"share_of_peak", line.gflops / line.peak_gflops},
                    {line.reference(), line.ratio},
                    {"cpu_share", line.measured.cpu_share},
                    {"peak_bytes", line.measured.peak_bytes},
                    {"rank_peak_bytes", line.measured.rank_peak_bytes},
                    {"lower_bound_bytes", line.measured.lower_bound_bytes},
                    {"workspace_bytes", line.measured.workspace_bytes},
                    {"resident_bytes", line.measured.resident_bytes},
                    {"process_bytes", line.measured.process_bytes}};
  if (line.floors) {
    json.set("fma_gflops", line.floors->fma_gflops);
    json.set("triad_GBps", line.floors->triad_gbps);
  }
  if (line.share_of_fma) json.set("share_of_fma", *line.share_of_fma);
  cli::print_line(json_line(json));
}

void print_text(const Line& line) {
  const auto mib = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << line.what.model << ' ' << line.what.layout << ": " << line.tokens_per_s
      << " tokens/s, a step " << 1e3 * line.step_s << " ms (p95 " << 1e3 * quantile(line.measured.seconds, 0.95)
      << "), " << line.gflops << " GFLOP/s, " << 100 * line.gflops / line.peak_gflops << "% of " << line.limit << "'s "
      << line.peak_gflops;
  if (line.share_of_fma) out << ", " << 100 * *line.share_of_fma << "% of the loop of multiply-adds before each step";
  out << "; " << std::setprecision(3) << line.ratio
      << (line.what.plan.shard.strategy == Shard::none ? " of one rank's speed with the same sequences"
                                                       : " of the speed without sharding")
      << "; processor use " << std::setprecision(1) << 100 * line.measured.cpu_share << "%\n  memory: planned "
      << mib(line.measured.peak_bytes) << " MiB (at least " << mib(line.measured.lower_bound_bytes)
      << "), the process grew by " << mib(line.measured.resident_bytes) << " to " << mib(line.measured.process_bytes)
      << "\n  kernel                     nodes  ms a step   share    GFLOP/s       GB/s"
      << (line.floors ? "   of floor" : "");
  cli::print_line(out.str());
}

void print_kernels(const Line& line, const TrainOptions& options) {
  double all_s = 0;
  for (const OpTime& op : line.measured.ops) all_s += op.own_s;
  for (const OpTime& op : line.measured.ops) {
    const double share = op.own_s / all_s, gflops = op.own_s > 0 ? op.flops / op.own_s / 1e9 : 0,
                 gbps = op.own_s > 0 ? op.bytes_moved / op.own_s / 1e9 : 0;
    std::optional<double> floor_share;
    if (line.floors && op.own_s > 0) floor_share = line.floors->seconds(op.flops, op.bytes_moved) / op.own_s;
    if (options.json) {
      JsonValue json = {{"type", "kernel"},
                        {"model", line.what.model},
                        {"layout", line.what.layout},
                        {"threads", options.threads},
                        {"op", op.op},
                        {"nodes", op.num_tasks},
                        {"ms", 1e3 * op.own_s},
                        {"node_ms", 1e3 * op.seconds},
                        {"share", share},
                        {"gflops", gflops},
                        {"GBps", gbps}};
      if (floor_share) json.set("floor_share", *floor_share);
      cli::print_line(json_line(json));
    } else {
      std::ostringstream out;
      out << "  " << std::left << std::setw(24) << op.op << std::right << std::setw(8) << op.num_tasks << std::fixed
          << std::setprecision(2) << std::setw(11) << 1e3 * op.own_s << std::setprecision(1) << std::setw(7)
          << 100 * share << '%' << std::setw(11) << gflops << std::setw(11) << gbps;
      if (floor_share) out << std::setw(10) << 100 * *floor_share << '%';
      cli::print_line(out.str());
    }
  }
}

// The figures of one case that are compared between numbers of threads.
struct Scaled {
  const TrainingCase& what;
  int threads;
  double tokens_per_s, fma_gflops, cpu_share;
};

// The median over the steps.
std::optional<double> share_of_fma(const Measured& measured, double flops) {
  if (measured.fma_gflops.empty()) return std::nullopt;
  std::vector<double> shares;
  for (std::size_t i = 0; i < measured.seconds.size(); ++i)
    shares.push_back(flops / measured.seconds[i] / 1e9 / measured.fma_gflops[i]);
  return quantile(shares, 0.5);
}

std::vector<Scaled> train_on(const std::vector<TrainingCase>& cases, const TrainOptions& options) {
  const bool on_cuda = options.backend == "cuda";
  std::map<DType, double> peaks;  // of the types of the models, in GFLOP/s
  for (const TrainingCase& what : cases) {
    const DType type = what.plan.precision.param;
    if (peaks.contains(type)) continue;
    peaks[type] = on_cuda ? product_peak(options.devices.empty() ? 0 : options.devices.front(), type,
                                         options.dry_run ? 256 : 8192, 10)
                          : sgemm_peak(options.threads, options.dry_run ? std::vector<std::int64_t>{64} : peak_sizes(),
                                       options.dry_run ? 1 : 5, type);
  }
  std::optional<Floors> floors;
  if (!on_cuda) floors = measure_floors(options.threads, options.dry_run);
  std::vector<Scaled> out;
  for (const TrainingCase& what : cases) {
    const Measured measured = measure(what, options);
    const double step_s     = quantile(measured.seconds, 0.5);
    const double per_s      = static_cast<double>(what.tokens()) / step_s;
    const double ratio = measured.reference_seconds.empty() ? 1 : quantile(measured.reference_seconds, 0.5) / step_s;
    const Line line{what,
                    measured,
                    step_s,
                    per_s,
                    per_s * what.flops_per_token() / 1e9,
                    peaks.at(what.plan.precision.param),
                    ratio,
                    on_cuda || what.plan.precision.param == DType::bf16 ? "the best product" : "sgemm",
                    floors,
                    share_of_fma(measured, static_cast<double>(what.tokens()) * what.flops_per_token())};
    options.json ? print_json(line, options) : print_text(line);
    print_kernels(line, options);
    out.push_back({what, options.threads, per_s, floors ? floors->fma_gflops : 0, measured.cpu_share});
  }
  return out;
}

// How the speed of each case grows with the number of threads, beside that of a loop of multiply-adds.
void print_scaling(const std::vector<std::vector<Scaled>>& of_counts, const TrainOptions& options) {
  if (!options.json)
    cli::print_line("\nmodel  layout    threads    tokens/s   speedup   of multiply-adds   share   processor use");
  for (std::size_t i = 0; i < of_counts.front().size(); ++i) {
    const Scaled& first = of_counts.front()[i];
    for (const std::vector<Scaled>& of_count : of_counts) {
      const Scaled& one    = of_count[i];
      const double speedup = one.tokens_per_s / first.tokens_per_s, of_fma = one.fma_gflops / first.fma_gflops;
      if (options.json) {
        cli::print_line(json_line({{"type", "scaling"},
                                   {"model", one.what.model},
                                   {"layout", one.what.layout},
                                   {"threads", one.threads},
                                   {"first_threads", first.threads},
                                   {"tokens_per_s", one.tokens_per_s},
                                   {"speedup", speedup},
                                   {"fma_speedup", of_fma},
                                   {"share_of_fma_speedup", speedup / of_fma},
                                   {"cpu_share", one.cpu_share}}));
        continue;
      }
      std::ostringstream out;
      out << std::left << std::setw(7) << one.what.model << std::setw(8) << one.what.layout << std::right
          << std::setw(9) << one.threads << std::fixed << std::setprecision(1) << std::setw(12) << one.tokens_per_s
          << std::setprecision(2) << std::setw(10) << speedup << std::setw(19) << of_fma << std::setw(8)
          << speedup / of_fma << std::setprecision(1) << std::setw(15) << 100 * one.cpu_share << '%';
      cli::print_line(out.str());
    }
  }
}

}  // namespace

void train(const TrainOptions& options) {
  if (!options.updates.empty()) return train_updates(options);
  Shard strategy = Shard::none;
  for (int i = 0; i <= static_cast<int>(Shard::full); ++i) {
    if (to_string(static_cast<Shard>(i)) == options.shard) strategy = static_cast<Shard>(i);
  }
  std::vector<TrainingCase> cases;  // impossible cases are refused before the first measurement
  for (const std::string& model : options.models) {
    for (const std::string& layout : options.layouts) {
      cases.push_back(training_case(model, layout, strategy));
      if (cases.back().plan.layout.pp > 1) cases.back().plan.pipeline.split = options.split;
    }
  }
  if (has_processes(options.backend)) return process_train(cases, options);
  std::vector<std::vector<Scaled>> of_counts;
  TrainOptions with = options;
  for (const int threads : options.thread_counts.empty() ? std::vector{options.threads} : options.thread_counts) {
    with.threads = threads;
    of_counts.push_back(train_on(cases, with));
  }
  if (of_counts.size() > 1) print_scaling(of_counts, options);
}

}  // namespace stepgraph::bench
