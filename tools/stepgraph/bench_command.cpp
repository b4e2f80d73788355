#include <memory>

#include "tools/bench/overhead.hpp"
#include "tools/stepgraph/commands.hpp"

namespace stepgraph::cli {

void add_bench(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "Measure, beside a baseline taken in the same run");
  bench->require_subcommand(1);
  bench->footer("Example: stepgraph bench overhead --threads 2 --json");

  CLI::App* overhead =
      bench->add_subcommand("overhead", "Cost of a node: running it against plain Taskflow, recording it, building it, verifying it");
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
}

}  // namespace stepgraph::cli
