#include <algorithm>
#include <memory>

#include "graphs/predict/calibration.hpp"
#include "tools/bench/collectives/collectives.hpp"
#include "tools/bench/memory/adam.hpp"
#include "tools/bench/memory/copy.hpp"
#include "tools/bench/overhead/crew.hpp"
#include "tools/bench/overhead/overhead.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/commands/bench_options.hpp"
#include "tools/stepgraph/commands/bench_training.hpp"
#include "tools/stepgraph/session/config_options.hpp"
#include "tools/stepgraph/session/targets.hpp"

namespace stepgraph::cli {
namespace {

void add_bench_adam(Command bench) {
  Command command = bench.subcommand("adam", "AdamW in fp32, against the triad a = b + s * c on as much memory");
  auto options    = std::make_shared<bench::AdamOptions>();
  command.option("--elements", options->elements, "Number of parameters")
      .between(std::int64_t{1}, std::int64_t{1} << 32);
  options->threads = num_cores();
  add_threads(command, options->threads);
  command.option("--runs", options->runs, "Runs; the median is printed").between(1, 10'000);
  command.flag("--copies", options->copies,
               "Also AdamW of the host while copies between pinned and device memory run in both directions");
  add_backend(command, options->backend);
  add_common(command, *options);
  command.footer(
      "copies_cover: whether copies ran for at least as long as AdamW\n"
      "Example: stepgraph bench adam --elements 29500000 --threads 2 --json");
  run_bench(command, [options] {
    warn_about_threads(options->threads);
    bench::adam(*options);
  });
}

void add_bench_collectives(Command bench) {
  Command command =
      bench.subcommand("collectives",
                       "Collectives: on loopback against memcpy of as much memory on the same threads; over processes, "
                       "beside the library's own all-reduce");
  auto options = std::make_shared<bench::CollectivesOptions>();
  command.list("--ranks", options->ranks, "Numbers of ranks; over processes, as many as there are").between(2, 512);
  command
      .option("--backend", options->backend, "Where ranks are; with gloo, mpi and nccl start one process for each rank")
      .one_of({"loopback", "gloo", "mpi", "nccl"});
  const auto gpus = add_gpu_options(command);
  command.list("--ops", options->ops, "Collectives").one_of(bench::known_collectives());
  command.list("--algorithms", options->algorithms, "Algorithms").one_of(bench::known_algorithms());
  command.list("--sizes", options->sizes, "Size of the larger buffer of a rank, in bytes or as in 64MiB")
      .size()
      .between(std::int64_t{4}, std::int64_t{1} << 32);
  add_threads(command, options->threads);
  command.option("--runs", options->runs, "Runs; the median is printed").between(1, 10'000);
  add_common(command, *options);
  command.footer(
      "Lists have commas: --ranks 2,4,8.\nExample: stepgraph bench collectives --ranks 2,4,8 --json\n"
      "         stepgraph launch -n 2 -- bench collectives --backend gloo --ops all_reduce\n"
      "         mpirun -n 2 stepgraph bench collectives --backend mpi --ops all_reduce");
  run_bench(command, [options, gpus] {
    apply(*gpus, *options);
    if (options->backend == "loopback") warn_about_threads(options->threads);
    bench::collectives(*options);
  });
}

void add_bench_overhead(Command bench) {
  Command command =
      bench.subcommand("overhead", "The cost of a node: to run it, against plain Taskflow, and to build and verify it");
  auto options = std::make_shared<bench::OverheadOptions>();
  command
      .list("--threads", options->threads, "Threads, also for the baseline; several: graphs are run with each in turn")
      .between(1, 1024);
  command.option("--nodes", options->nodes, "Nodes in each graph that is run").between(100, 10'000'000);
  command.option("--pairs", options->pairs, "Runs of both sides, in turn; the median is printed").between(1, 10'000);
  command.list("--build-nodes", options->build_nodes, "Nodes in each graph that is built");
  add_common(command, *options);
  command.footer("Example: stepgraph bench overhead --threads 2,16 --pairs 21 --json");
  run_bench(command, [options] {
    warn_about_threads(*std::max_element(options->threads.begin(), options->threads.end()));
    bench::overhead(*options);
  });
}

void add_bench_crew(Command bench) {
  Command command = bench.subcommand("crew", "Sharing out the tiles of kernels, against tbb::parallel_for");
  auto options    = std::make_shared<bench::CrewOptions>();
  command.list("--threads", options->threads, "Numbers of threads").between(1, 1024);
  command.list("--ranks", options->ranks, "Numbers of ranks, each with kernels of its own").between(1, 1024);
  command.option("--runs", options->runs, "Runs of each way, in turn; the median is printed").between(1, 10'000);
  add_common(command, *options);
  command.footer(
      "ratio_to_tbb: the time of TBB's better partitioner over ours\n"
      "Example: stepgraph bench crew --threads 2,8,16 --ranks 1,2,8");
  run_bench(command, [options] {
    warn_about_threads(*std::max_element(options->threads.begin(), options->threads.end()));
    bench::crew(*options);
  });
}

void add_bench_copy(Command bench) {
  Command command = bench.subcommand(
      "copy", "Copies between host and device: each direction alone, both at once, and both during matrix products");
  auto options = std::make_shared<bench::CopyOptions>();
  auto force   = std::make_shared<bool>(false);
  add_backend(command, options->backend);
  command.option("--bytes", options->bytes, "Size of a copy, in bytes or as in 256MiB")
      .size()
      .between(std::int64_t{1}, std::int64_t{1} << 36);
  command.option("--copies", options->copies, "Copies in each direction").between(1, 10'000);
  command.option("--width", options->width, "Rows and columns of a matrix (default: 8192 on a device, 512 on loopback)")
      .between(std::int64_t{8}, std::int64_t{1} << 16);
  command.option("--runs", options->runs, "Runs; the median is printed").between(1, 10'000);
  command.option("--threads", options->threads, "Compute threads, on loopback").between(1, 1024);
  command.option("--trace", options->trace, "Write the times of the last run to this file, for ui.perfetto.dev");
  add_force(command, *force);
  add_common(command, *options);
  command.footer(
      "compute_slowdown: the time of a product during copies, over its time alone\n"
      "three_at_once_share: the share of the time in which both copies and a product run\n"
      "Example: stepgraph bench copy --trace copies.json --json");
  run_bench(command, [options, force] {
    if (options->backend == "loopback") warn_about_threads(options->threads);
    check_target("--trace", options->trace, FileKind::trace, *force);
    bench::copy(*options);
  });
}

}  // namespace

void add_bench(Command program) {
  Command bench = program.subcommand("bench", "Benchmarks. Each measures its baseline in the same run");
  bench.require_subcommand();
  bench.footer("Example: stepgraph bench overhead --threads 2 --json");

  add_bench_overhead(bench);
  add_bench_adam(bench);
  add_bench_capture(bench);
  add_bench_collectives(bench);
  add_bench_checkpoint(bench);
  add_bench_copy(bench);
  add_bench_crew(bench);
  add_bench_train(bench);
  add_bench_predict(bench);
  add_bench_pipeline(bench);
}

}  // namespace stepgraph::cli
