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

void add_adam(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand(
      "adam", "Speed of AdamW on f32, beside a triad a = b + s c over as much memory by the same threads");
  auto options = std::make_shared<bench::AdamOptions>();
  command->add_option("--elements", options->elements, "Parameters")
      ->capture_default_str()
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 32));
  command->add_option("--threads", options->threads, "Workers, for both sides")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  command->add_option("--runs", options->runs, "Steps, each followed by a triad; the medians count")
      ->capture_default_str()
      ->check(CLI::Range(1, 10'000));
  command->add_flag("--dry-run", options->dry_run, "One small iteration of everything: a smoke test, not a figure");
  command->add_flag("--json", options->json, "Print JSON lines and nothing else");
  command->footer("Example: stepgraph bench adam --elements 29500000 --threads 2 --json");
  command->callback([options] { bench::adam(*options); });
}

void add_collectives(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand(
      "collectives",
      "Speed of collectives on loopback, beside memcpy: the bytes copied per second by as many threads, from one half "
      "of a memory of ranks x bytes to the other, in the same run");
  auto options = std::make_shared<bench::CollectivesOptions>();
  command->add_option("--ranks", options->ranks, "Numbers of ranks")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(2, 512));
  command->add_option("--ops", options->ops, "Which collectives")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::IsMember(bench::known_collectives()));
  command->add_option("--algorithms", options->algorithms, "How they are done")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::IsMember(bench::known_algorithms()));
  command->add_option("--sizes", options->sizes, "Bytes of one rank's buffer: the side that holds everything")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(std::int64_t{4}, std::int64_t{1} << 32));
  command->add_option("--threads", options->threads, "Workers, for both sides")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  command->add_option("--runs", options->runs, "Runs of each chain; the median counts")
      ->capture_default_str()
      ->check(CLI::Range(1, 10'000));
  command->add_flag("--dry-run", options->dry_run, "One small iteration of everything: a smoke test, not a figure");
  command->add_flag("--json", options->json, "Print JSON lines and nothing else");
  command->footer("Example: stepgraph bench collectives --ranks 2,4,8 --json");
  command->callback([options] { bench::collectives(*options); });
}

// What benchmarks of training have in common.
template <class Options>
void add_training_options(CLI::App& command, Options& options) {
  command.add_option("--models", options.models, "Which models")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::IsMember(bench::known_models()));
  command.add_option("--layouts", options.layouts, "Ranks: data x tensor x pipeline parallel")
      ->delimiter(',')
      ->capture_default_str();
  command.add_option("--steps", options.steps, "Steps that are counted; the median is taken")
      ->capture_default_str()
      ->check(CLI::Range(1, 10'000));
  options.threads = std::min(2, num_cores());
  command.add_option("--threads", options.threads, "Workers; all ranks share them")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  command.add_flag("--dry-run", options.dry_run, "One step of everything: a smoke test, not a figure");
  command.add_flag("--json", options.json, "Print JSON lines and nothing else");
}

constexpr const char* models_text =
    "Models are GPT-2 in fp32 with AdamW. S: 4 layers, width 256, 8 heads, sequences of 128, 8 of them, vocabulary "
    "4096; "
    "M: 8 layers, width 512, 8 heads, sequences of 256, 4 of them, vocabulary 8192; tiny is for tests. Data-parallel "
    "ranks share those sequences. Layouts with tensor or pipeline parallel ranks train eight times as many, in eight "
    "microbatches (M: 32 in microbatches of 4), as a pipeline needs several to be full. 124M, 350M and 1558M are "
    "GPT-2's "
    "sizes in bf16 for a GPU: sequences of 1024, 64, 32 and 8 of them.";

void add_backend(CLI::App& command, std::string& backend) {
  command.add_option("--backend", backend, "Where ranks live")
      ->capture_default_str()
      ->check(CLI::IsMember({"loopback", "cuda"}));
}

void add_capture(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand(
      "capture",
      str("Training steps on a GPU, captured and enqueued as one, in turn with the same enqueued node by node: their "
          "time, that of the host until all is enqueued, and for which share of the time the GPU has nothing to do. ",
          models_text,
          " issue_ms is how long a thread was busy enqueuing, waiting for room in the GPU's queues included. "
          "idle_share "
          "is that in which no kernel, copy or fill ran, from the first to the last of some steps in a row, the time "
          "between steps included; recording that (CUPTI) slows steps down, so that it is no less than without. "
          "idle_estimate is 1 - busy_ms / step_ms: what ran as long as it did then, in a step that was not recorded. "
          "One model: once something was recorded, nothing in the process is as fast as before."));
  auto options = std::make_shared<bench::CaptureOptions>();
  command->add_option("--model", options->model, "Which model")
      ->capture_default_str()
      ->check(CLI::IsMember(bench::known_models()));
  command->add_option("--layout", options->layout, "Ranks: data x tensor x pipeline parallel")->capture_default_str();
  add_backend(*command, options->backend);
  command->add_option("--steps", options->steps, "Steps of each kind that are counted; the median is taken")
      ->capture_default_str()
      ->check(CLI::Range(1, 10'000));
  command->add_flag("--dry-run", options->dry_run, "One step of everything: a smoke test, not a figure");
  command->add_flag("--json", options->json, "Print JSON lines and nothing else");
  command->footer("Example: stepgraph bench capture --model 350M --json");
  command->callback([options] { bench::capture(*options); });
}

void add_copy(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand(
      "copy",
      "Speed of copies between pinned memory of the host and a device: each way alone, both at once, and both while "
      "products of bf16 run, which are timed alone too. Each is a lane of one graph (h2d, d2h, compute); times are the "
      "device's. compute_slowdown is a product's time beside copies against alone, three_at_once_share the share of "
      "that run in which all three lanes are at work. On loopback copies are a thread's");
  auto options = std::make_shared<bench::CopyOptions>();
  add_backend(*command, options->backend);
  command->add_option("--bytes", options->bytes, "Of one copy")
      ->capture_default_str()
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 36));
  command->add_option("--copies", options->copies, "One after another, each way")
      ->capture_default_str()
      ->check(CLI::Range(1, 10'000));
  command->add_option("--width", options->width, "Of the matrices (default: 8192 on a device, 512 on loopback)")
      ->check(CLI::Range(std::int64_t{8}, std::int64_t{1} << 16));
  command->add_option("--runs", options->runs, "Of each case; the medians count")
      ->capture_default_str()
      ->check(CLI::Range(1, 10'000));
  command->add_option("--threads", options->threads, "Workers, on loopback")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  command->add_option("--trace", options->trace,
                      "A file for the times of the last run of everything at once (see ui.perfetto.dev)");
  command->add_flag("--dry-run", options->dry_run, "One small iteration of everything: a smoke test, not a figure");
  command->add_flag("--json", options->json, "Print JSON lines and nothing else");
  command->footer("Example: stepgraph bench copy --trace copies.json --json");
  command->callback([options] {
    check_can_write("--trace", options->trace);
    bench::copy(*options);
  });
}

void add_bench_train(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand(
      "train",
      str("Speed of training steps, beside sgemm on the same threads, and what they are spent on. ", models_text,
          " ratio_to_1x1x1 is the speed against the same sequences in as many microbatches on one rank with as "
          "many threads: work and machine are the same, steps alternate. peak_gflops is the best sgemm of "
          "squares from 512 to 2048; a token takes 6 (12 L d^2 + V d) + 12 L T d flops. peak_bytes is what is "
          "planned for all ranks together, resident_bytes by how much the process grew. Kernels are the nodes "
          "of one more step: their time is that on their own thread, helped or not; cpu_share "
          "is processor time over the threads' time, in which helpers also look for the next kernel. With a "
          "strategy of sharding, ratio_to_dp is the speed against the same layout without it."));
  auto options = std::make_shared<bench::TrainOptions>();
  add_training_options(*command, *options);
  command->add_option("--shard", options->shard, "How data-parallel ranks share the state of training")
      ->capture_default_str()
      ->check(CLI::IsMember({"none", "zero1", "grad_op", "full"}));
  add_backend(*command, options->backend);
  command->footer("Example: stepgraph bench train --models S --layouts 1x1x1,2x1x1 --json");
  command->callback([options] { bench::train(*options); });
}

void add_bench_predict(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand(
      "predict", str("How well `simulate` predicts: measures this machine, predicts training steps, then runs them. ",
                     models_text));
  auto options = std::make_shared<bench::PredictOptions>();
  add_training_options(*command, *options);
  command->add_option("--machine", options->machine, "What was measured before, by simulate --calibrate");
  command->footer("Example: stepgraph bench predict --models S --json");
  command->callback([options] { bench::predict(*options); });
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "Measure, beside a baseline taken in the same run");
  bench->require_subcommand(1);
  bench->footer("Example: stepgraph bench overhead --threads 2 --json");

  CLI::App* overhead = bench->add_subcommand(
      "overhead", "Cost of a node: running it against plain Taskflow, recording it, building it, verifying it");
  auto options = std::make_shared<bench::OverheadOptions>();
  overhead->add_option("--threads", options->threads, "Workers, for both sides")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  overhead->add_option("--nodes", options->nodes, "Nodes of each graph that is run")
      ->capture_default_str()
      ->check(CLI::Range(100, 10'000'000));
  overhead->add_option("--pairs", options->pairs, "Alternating pairs of runs; the median counts")
      ->capture_default_str()
      ->check(CLI::Range(1, 10'000));
  overhead->add_option("--build-nodes", options->build_nodes, "Sizes of the graphs that are built")
      ->delimiter(',')
      ->capture_default_str();
  overhead->add_flag("--dry-run", options->dry_run, "One small iteration of everything: a smoke test, not a figure");
  overhead->add_flag("--json", options->json, "Print JSON lines and nothing else");
  overhead->footer("Example: stepgraph bench overhead --pairs 21 --json");
  overhead->callback([options] { bench::overhead(*options); });
  add_adam(*bench);
  add_capture(*bench);
  add_collectives(*bench);
  add_copy(*bench);
  add_bench_train(*bench);
  add_bench_predict(*bench);
}

}  // namespace stepgraph::cli
