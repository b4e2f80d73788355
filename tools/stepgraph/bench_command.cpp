#include <memory>

#include "tools/bench/adam.hpp"
#include "tools/bench/collectives.hpp"
#include "tools/bench/overhead.hpp"
#include "tools/stepgraph/commands.hpp"

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
  add_collectives(*bench);
}

}  // namespace stepgraph::cli
