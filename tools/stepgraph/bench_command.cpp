#include <algorithm>
#include <memory>

#include "engine/base/error.hpp"
#include "graphs/predict/calibration.hpp"
#include "tools/bench/adam.hpp"
#include "tools/bench/capture.hpp"
#include "tools/bench/collectives.hpp"
#include "tools/bench/copy.hpp"
#include "tools/bench/overhead.hpp"
#include "tools/bench/predict.hpp"
#include "tools/bench/train.hpp"
#include "tools/bench/training.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/session.hpp"

namespace stepgraph::cli {
namespace {

// The flags that all benchmarks have. `iteration` is what a dry run does of each case.
template <class Options>
void add_flags(Command command, Options& options, const char* iteration) {
  command.flag("--dry-run", options.dry_run, str(iteration, " of each case: a smoke test, not a measurement"));
  command.flag("--json", options.json, "Print JSON lines and nothing else");
}

void add_adam(Command bench) {
  Command command = bench.subcommand(
      "adam", "Speed of AdamW on f32. The baseline is a triad a = b + s c with the same memory size and threads");
  auto options = std::make_shared<bench::AdamOptions>();
  command.option("--elements", options->elements, "Parameters").between(std::int64_t{1}, std::int64_t{1} << 32);
  command.option("--threads", options->threads, "Threads, also for the baseline").between(1, 1024);
  command.option("--runs", options->runs, "Steps, each followed by a triad; medians are printed").between(1, 10'000);
  add_flags(command, *options, "One small iteration");
  command.footer("Example: stepgraph bench adam --elements 29500000 --threads 2 --json");
  command.run([options] { bench::adam(*options); });
}

void add_collectives(Command bench) {
  Command command = bench.subcommand("collectives",
                                     "Speed of collectives on loopback. The baseline is memcpy in the same run: the "
                                     "same number of threads copies one half of ranks x bytes of memory to the "
                                     "other half");
  auto options    = std::make_shared<bench::CollectivesOptions>();
  command.list("--ranks", options->ranks, "Numbers of ranks, separated by commas").between(2, 512);
  command.list("--ops", options->ops, "Collectives").one_of(bench::known_collectives());
  command.list("--algorithms", options->algorithms, "Algorithms").one_of(bench::known_algorithms());
  command.list("--sizes", options->sizes, "Bytes of one rank's larger buffer")
      .between(std::int64_t{4}, std::int64_t{1} << 32);
  command.option("--threads", options->threads, "Threads, also for the baseline").between(1, 1024);
  command.option("--runs", options->runs, "Runs of each chain; the median is printed").between(1, 10'000);
  add_flags(command, *options, "One small iteration");
  command.footer("Example: stepgraph bench collectives --ranks 2,4,8 --json");
  command.run([options] { bench::collectives(*options); });
}

void add_overhead(Command bench) {
  Command command = bench.subcommand(
      "overhead", "Cost of a node: running it (against plain Taskflow), recording it, building it and verifying it");
  auto options = std::make_shared<bench::OverheadOptions>();
  command.option("--threads", options->threads, "Threads, also for the baseline").between(1, 1024);
  command.option("--nodes", options->nodes, "Nodes of each graph that runs").between(100, 10'000'000);
  command.option("--pairs", options->pairs, "Alternating pairs of runs; the median is printed").between(1, 10'000);
  command.list("--build-nodes", options->build_nodes, "Nodes of the graphs that are built");
  add_flags(command, *options, "One small iteration");
  command.footer("Example: stepgraph bench overhead --pairs 21 --json");
  command.run([options] { bench::overhead(*options); });
}

// Options that all benchmarks of training have.
template <class Options>
void add_training_options(Command command, Options& options) {
  command.list("--models", options.models, "Which models").one_of(bench::known_models());
  command.list("--layouts", options.layouts, "Ranks: data x tensor x pipeline parallel");
  command.option("--steps", options.steps, "Measured steps; the median is printed").between(1, 10'000);
  options.threads = std::min(2, num_cores());
  command.option("--threads", options.threads, "Compute threads, shared by all ranks").between(1, 1024);
  add_flags(command, options, "One step");
}

constexpr const char* models_text =
    "Models are GPT-2 in fp32 with AdamW. S: 4 layers, width 256, 8 heads, 8 sequences of 128 tokens, vocabulary "
    "4096. M: 8 layers, width 512, 8 heads, 4 sequences of 256 tokens, vocabulary 8192. tiny is for tests. "
    "Data-parallel ranks share the sequences. With tensor or pipeline parallelism the batch is eight times as large "
    "and has eight microbatches, to fill the pipeline (M: 32 sequences in microbatches of 4). 124M, 350M and 1558M "
    "are GPT-2 models in bf16 for a GPU, with 64, 32 and 8 sequences of 1024 tokens.";

void add_backend(Command command, std::string& backend) {
  command.option("--backend", backend, "Backend of the ranks").one_of({"loopback", "cuda"});
}

void add_capture(Command bench) {
  Command command = bench.subcommand(
      "capture",
      str("Training steps on a GPU, enqueued as one CUDA graph and node by node. The two alternate. Prints the time "
          "of a step, the time until the host has enqueued it, and the share of time in which the GPU is idle. ",
          models_text,
          " issue_ms is the time that the issuing thread is busy, including waits for room in the GPU's queues. "
          "idle_share is the share of time in which no kernel, copy or fill runs, over several consecutive steps and "
          "the time between them. It is recorded with CUPTI. Recording slows steps down, so idle_share is an upper "
          "bound. idle_estimate is 1 - busy_ms / step_ms. busy_ms is recorded; step_ms is measured without recording. "
          "A process measures only one model, because everything in it is slower after recording."));
  auto options = std::make_shared<bench::CaptureOptions>();
  command.option("--model", options->model, "Which model").one_of(bench::known_models());
  command.option("--layout", options->layout, "Ranks: data x tensor x pipeline parallel");
  add_backend(command, options->backend);
  command.option("--steps", options->steps, "Measured steps of each kind; the median is printed").between(1, 10'000);
  add_flags(command, *options, "One step");
  command.footer("Example: stepgraph bench capture --model 350M --json");
  command.run([options] { bench::capture(*options); });
}

void add_copy(Command bench) {
  Command command =
      bench.subcommand("copy",
                       "Speed of copies between pinned host memory and a device. The cases are each direction alone, "
                       "both at once, bf16 matrix products alone, and both directions during products. Each "
                       "direction and the products are a lane of one graph (h2d, d2h, compute). Times come from the "
                       "device's clock. compute_slowdown is the time of a product during copies divided by its time "
                       "alone. three_at_once_share is the share of that run in which all three lanes are busy. On "
                       "loopback a thread copies");
  auto options = std::make_shared<bench::CopyOptions>();
  add_backend(command, options->backend);
  command.option("--bytes", options->bytes, "Bytes of one copy").between(std::int64_t{1}, std::int64_t{1} << 36);
  command.option("--copies", options->copies, "Copies in each direction, one after another").between(1, 10'000);
  command
      .option("--width", options->width,
              "Rows and columns of the matrices (default: 8192 on a device, 512 on loopback)")
      .between(std::int64_t{8}, std::int64_t{1} << 16);
  command.option("--runs", options->runs, "Runs of each case; medians are printed").between(1, 10'000);
  command.option("--threads", options->threads, "Compute threads, on loopback").between(1, 1024);
  command.option("--trace", options->trace,
                 "Write the times of the last run with all three lanes to this file, for ui.perfetto.dev");
  add_flags(command, *options, "One small iteration");
  command.footer("Example: stepgraph bench copy --trace copies.json --json");
  command.run([options] {
    check_can_write("--trace", options->trace);
    bench::copy(*options);
  });
}

void add_bench_train(Command bench) {
  Command command = bench.subcommand(
      "train",
      str("Speed of training steps against sgemm on the same threads, and the time of each kernel. ", models_text,
          " ratio_to_1x1x1 is the speed relative to one rank with the same sequences, microbatches and threads; the "
          "two alternate step by step. peak_gflops is the best sgemm of square matrices from 512 to 2048. A token "
          "takes 6 (12 L d^2 + V d) + 12 L T d flops. peak_bytes is the planned memory of all ranks. resident_bytes "
          "is the growth of the process. Kernels are timed in one more step, each on the thread that runs its node, "
          "with or without helper threads. cpu_share is processor time divided by the time of all threads; it "
          "includes the search for work. With sharding, ratio_to_dp is the speed relative to the same layout without "
          "sharding."));
  auto options = std::make_shared<bench::TrainOptions>();
  add_training_options(command, *options);
  command.option("--shard", options->shard, "Sharding of the training state over data-parallel ranks")
      .one_of({"none", "zero1", "grad_op", "full"});
  add_backend(command, options->backend);
  command.footer("Example: stepgraph bench train --models S --layouts 1x1x1,2x1x1 --json");
  command.run([options] { bench::train(*options); });
}

void add_bench_predict(Command bench) {
  Command command = bench.subcommand(
      "predict",
      str("Accuracy of `simulate`: measures this machine, predicts training steps, then runs them. ", models_text));
  auto options = std::make_shared<bench::PredictOptions>();
  add_training_options(command, *options);
  command.option("--machine", options->machine,
                 "Calibration file, written by simulate --calibrate (default: measure first)");
  command.footer("Example: stepgraph bench predict --models S --json");
  command.run([options] { bench::predict(*options); });
}

}  // namespace

void add_bench(Command program) {
  Command bench = program.subcommand("bench", "Benchmarks, each with a baseline measured in the same run");
  bench.require_subcommand();
  bench.footer("Example: stepgraph bench overhead --threads 2 --json");

  add_overhead(bench);
  add_adam(bench);
  add_capture(bench);
  add_collectives(bench);
  add_copy(bench);
  add_bench_train(bench);
  add_bench_predict(bench);
}

}  // namespace stepgraph::cli
