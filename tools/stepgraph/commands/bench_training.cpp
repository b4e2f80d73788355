#include "tools/stepgraph/commands/bench_training.hpp"

#include <algorithm>
#include <memory>

#include "engine/base/error.hpp"
#include "graphs/predict/calibration.hpp"
#include "tools/bench/training/capture.hpp"
#include "tools/bench/training/checkpoint.hpp"
#include "tools/bench/training/pipeline.hpp"
#include "tools/bench/training/predict.hpp"
#include "tools/bench/training/train.hpp"
#include "tools/bench/training/training.hpp"
#include "tools/stepgraph/commands/bench_options.hpp"
#include "tools/stepgraph/session/config_options.hpp"

namespace stepgraph::cli {
namespace {

constexpr const char* models_text =
    "Models are GPT-2:\n"
    "  S                   4 layers, width 256, 8 heads, 8 sequences of 128 tokens, vocabulary 4096, fp32\n"
    "  M                   8 layers, width 512, 8 heads, 4 sequences of 256 tokens, vocabulary 8192, fp32\n"
    "  L                   12 layers, width 768, 12 heads, 4 sequences of 1024 tokens, vocabulary 50304, fp32\n"
    "  S-bf16, M-bf16, L-bf16   the same in bf16\n"
    "  124M, 350M, 1558M   the sizes of GPT-2 in bf16, for a GPU; 64, 32 and 8 sequences of 1024 tokens\n"
    "  tiny                for tests\n"
    "With tensor or pipeline parallel ranks the batch is eight times as large, in eight microbatches.\n";

// Options that all benchmarks of training have.
template <class Options>
void add_training_options(Command command, Options& options) {
  command.list("--models", options.models, "Models").one_of(bench::known_models());
  command.list("--layouts", options.layouts, "Layouts: data x tensor x pipeline parallel ranks");
  command.option("--steps", options.steps, "Measured steps; the median is printed").between(1, 10'000);
  options.threads = std::min(2, num_cores());
  add_common(command, options);
}

}  // namespace

void add_bench_capture(Command bench) {
  Command command =
      bench.subcommand("capture", "Training steps on a GPU, launched as one CUDA graph and node by node, in turn");
  auto options = std::make_shared<bench::CaptureOptions>();
  command.option("--model", options->model, "Model").one_of(bench::known_models());
  command.option("--layout", options->layout, "Layout: data x tensor x pipeline parallel ranks");
  add_backend(command, options->backend);
  command.option("--steps", options->steps, "Measured steps of each kind; the median is printed").between(1, 10'000);
  add_common(command, *options);
  command.footer(
      str(models_text,
          "issue_ms: the time the issuing thread is busy, including waits for room in the GPU's queues\n"
          "idle_share: the share of several steps in which the GPU does nothing; recording (CUPTI) makes it too large\n"
          "idle_estimate: 1 - busy_ms / step_ms, with the time of a step that is not recorded\n"
          "A process measures one model: after recording, everything in it is slower.\n"
          "Example: stepgraph bench capture --model 350M --json"));
  run_bench(command, [options] { bench::capture(*options); });
}

void add_bench_checkpoint(Command bench) {
  Command command =
      bench.subcommand("checkpoint", "Saving and loading a checkpoint, against a plain writer; and its cost for steps");
  auto options = std::make_shared<bench::CheckpointBenchOptions>();
  command.option("--model", options->model, "Model, in fp32").one_of(bench::known_models());
  command.option("--layout", options->layout, "Layout: data x tensor x pipeline parallel ranks");
  command.option("--folder", options->folder, "Where files are written, and removed again");
  command.option("--runs", options->runs, "Runs; the median is printed").between(1, 10'000);
  command.option("--steps", options->steps, "Steps with and without checkpoints, in turn; 0: none")
      .between(0, 1'000'000);
  command.option("--every", options->every, "Steps between checkpoints").between(1, 10'000);
  options->threads = std::min(2, num_cores());
  command.option("--threads", options->threads, "Compute threads, shared by all ranks").between(1, 1024);
  add_common(command, *options);
  command.footer(str(models_text, "Example: stepgraph bench checkpoint --model M --steps 100 --json"));
  run_bench(command, [options] {
    warn_about_threads(options->threads);
    bench::checkpoint(*options);
  });
}

void add_bench_train(Command bench) {
  Command command = bench.subcommand("train", "Training steps, against the best sgemm on the same threads");
  auto options    = std::make_shared<bench::TrainOptions>();
  add_training_options(command, *options);
  options->thread_counts = {options->threads};
  command
      .list("--threads", options->thread_counts,
            "Compute threads, shared by all ranks; several, as in 1,2,4,8,16, also print the scaling")
      .between(1, 1024);
  command.option("--warm-up", options->warm_up, "Steps before the measured ones").between(1, 10'000);
  command.option("--shard", options->shard, "Sharding over data-parallel ranks")
      .one_of({"none", "zero1", "grad_op", "full"});
  command
      .option("--backend", options->backend, "Where ranks are; with gloo, mpi and nccl start one process for each rank")
      .one_of({"loopback", "cuda", "gloo", "mpi", "nccl"});
  const auto gpus = add_gpu_options(command);
  command.list("--update", options->updates,
               "Compare kinds of updates instead: synchronous, stale:K, asynchronous:K; windows of --steps steps");
  command.option("--slow-rank", options->slow_factor, "With --update: rank 0 takes so many times as long (it sleeps)")
      .between(1.0, 1000.0);
  command.flag("--slow-in-turns", options->slow_in_turns,
               "With --slow-rank: in step s the slow rank is s modulo the number of ranks");
  command.list("--split", options->split, "Layers of each pipeline stage, as in 3,1 (default: even)").between(1, 9999);
  command.footer(str(
      models_text,
      "ratio_to_1x1x1: the speed over that of one rank with the same batch and threads, step by step in turn\n"
      "ratio_to_dp: with --shard, the speed over that of the same layout without sharding\n"
      "peak_gflops: the best product of square matrices from 512 to 2048, of bf16 for models in bf16; a token takes "
      "6 (12 L d^2 + V d) + 12 L T d flops\n"
      "peak_bytes: the planned memory of all ranks; resident_bytes: the growth of the process\n"
      "cpu_share: processor time over the time of all threads\n"
      "floor_share: the least time of a kernel over its time; a loop of multiply-adds (fma_gflops) and a triad\n"
      "  (triad_GBps) on the same threads give the least time. Above 1: its data were in caches, or it\n"
      "  multiplies bf16, for which the loop in fp32 is no limit\n"
      "share_of_fma: a step's speed over that of the loop just before it, the median\n"
      "speedup: with several --threads, the speed over that with the first; fma_speedup: that of the loop\n"
      "ratio_to_first: with --update, the speed over that of the first kind; the kinds run in turn\n"
      "ratio_to_loopback: over gloo and mpi, the speed over that of loopback with the threads of all processes\n"
      "Example: stepgraph bench train --models S --layouts 1x1x1,2x1x1 --json\n"
      "         stepgraph bench train --models M --layouts 1x1x1 --threads 1,2,4,8,16\n"
      "         stepgraph launch -n 2 -- bench train --backend gloo --models S --layouts 2x1x1 --threads 1\n"
      "         stepgraph launch -n 2 -- bench train --backend nccl --models 124M --layouts 2x1x1\n"
      "         stepgraph bench train --models S --layouts 2x1x1 --update synchronous,asynchronous:2 --slow-rank 3 "
      "--slow-in-turns"));
  run_bench(command, [options, gpus] {
    if (!options->updates.empty() && options->warm_up != bench::TrainOptions{}.warm_up)
      throw Error(ErrorKind::config,
                  "--warm-up: has no effect with --update, which runs one window first (leave it out)");
    if (options->updates.empty() && options->slow_factor > 1)
      throw Error(ErrorKind::config, "--slow-rank: has no effect without --update (add --update)");
    if (options->slow_factor == 1 && options->slow_in_turns)
      throw Error(ErrorKind::config, "--slow-in-turns: has no effect without --slow-rank (a factor above 1)");
    apply(*gpus, *options);
    options->threads = options->thread_counts.front();
    if (options->thread_counts.size() > 1 && (options->backend != "loopback" || !options->updates.empty()))
      throw Error(ErrorKind::config,
                  "--threads: several numbers are for backend loopback without --update (one number)");
    if (options->backend == "loopback")
      warn_about_threads(*std::max_element(options->thread_counts.begin(), options->thread_counts.end()));
    bench::train(*options);
  });
}

void add_bench_predict(Command bench) {
  Command command =
      bench.subcommand("predict", "The accuracy of `simulate`: predicted against measured training steps");
  auto options = std::make_shared<bench::PredictOptions>();
  add_training_options(command, *options);
  command.option("--threads", options->threads, "Compute threads, shared by all ranks").between(1, 1024);
  command.option("--machine", options->machine,
                 "Calibration file, made by simulate --calibrate (default: measure this machine first)");
  command
      .option(
          "--rounds", options->rounds,
          "How often the machine is measured (without --machine) and the steps run, for machines whose speed changes")
      .between(1, 100);
  command.flag("--kernels", options->kernels, "Also print the time of each kernel in a step, predicted and measured");
  command.footer(str(models_text,
                     "With several rounds, medians are printed; that of the ratios is not the ratio of the medians.\n"
                     "Example: stepgraph bench predict --models S --json"));
  run_bench(command, [options] {
    warn_about_threads(options->threads);
    bench::predict(*options);
  });
}

void add_bench_pipeline(Command bench) {
  Command command =
      bench.subcommand("pipeline", "The bubble of pipeline schedules: measured in training steps, and simulated");
  auto options = std::make_shared<bench::PipelineOptions>();
  command.option("--model", options->model, "Model").one_of(bench::known_models());
  command.list("--schedules", options->schedules, "Kinds of schedules, auto, or CSV files");
  command.option("--stages", options->stages, "Pipeline ranks").between(1, 64);
  command.option("--microbatches", options->microbatches, "Microbatches of a step").between(1, 4096);
  command.option("--steps", options->steps, "Measured steps of each schedule; medians are printed").between(1, 10'000);
  command.option("--threads", options->threads, "Compute threads: as many as ranks, to compare the two")
      .between(1, 1024);
  add_common(command, *options);
  command.footer(str(models_text, "Example: stepgraph bench pipeline --schedules 1f1b,zb-h1,zb-v --json"));
  run_bench(command, [options] {
    warn_about_threads(options->threads);
    bench::pipeline(*options);
  });
}

}  // namespace stepgraph::cli
