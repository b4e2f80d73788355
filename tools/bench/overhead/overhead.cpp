#include "tools/bench/overhead/overhead.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <optional>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/graph/edges.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/recorder.hpp"
#include "graphs/files/json_value.hpp"
#include "tools/bench/overhead/pairs.hpp"
#include "tools/bench/overhead/raw_taskflow.hpp"
#include "tools/bench/overhead/shapes.hpp"
#include "tools/bench/overhead/uses.hpp"
#include "tools/examples/sharded_step.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {
namespace {

// The graph must have the edges of the shape: a missing edge would make a wrong result fast.
void check_edges(const Shape& shape, const Graph& graph, const Program& program) {
  const Edges& edges = graph.edges();
  auto edge          = shape.edges.begin();
  bool same          = edges.preds.size() == shape.edges.size() && program.num_task_edges() == shape.edges.size() &&
              program.num_tasks() == shape.num_nodes;
  for (std::uint32_t node = 0; node < shape.num_nodes && same; ++node) {
    for (const std::uint32_t before : edges.before({node})) same &= edge->first == before && (edge++)->second == node;
  }
  if (!same)
    throw Error(ErrorKind::run,
                str("bench overhead: the graph built for '", shape.name, "' does not have the shape's edges"));
}

void check_bodies(const Shape& shape, Executor& executor, LoopbackWorld& world) {
  std::atomic<std::uint32_t> ran{0};
  const Graph graph = token_graph(shape, Body([&ran] { ran.fetch_add(1, std::memory_order_relaxed); }));
  executor.run(graph, world);
  if (ran != shape.num_nodes) {
    throw Error(ErrorKind::run,
                str("bench overhead: ", ran.load(), " of ", shape.num_nodes, " bodies of '", shape.name, "' ran"));
  }
}

void bench_run(const Shape& shape, int threads, const OverheadOptions& options) {
  LoopbackWorld world(1);
  Executor executor({.threads = threads});
  check_bodies(shape, executor, world);
  const Graph graph = token_graph(shape);
  const Program program(graph, world);
  check_edges(shape, graph, program);

  RawTaskflow taskflow;
  taskflow.build(shape);
  RawExecutor raw_executor(threads);
  const auto [ours, raw] =
      alternate([&] { executor.run(program); }, [&] { raw_executor.run(taskflow); }, shape.num_nodes, options);
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / raw[i]);
  const double ratio = quantile(ours, 0.5) / quantile(raw, 0.5);
  if (options.json) {
    cli::print_line(json_line({{"type", "run"},
                               {"graph", shape.name},
                               {"nodes", shape.num_nodes},
                               {"edges", shape.edges.size()},
                               {"threads", threads},
                               {"pairs", ours.size()},
                               {"ns_per_node", quantile(ours, 0.5)},
                               {"ns_per_node_p95", quantile(ours, 0.95)},
                               {"raw_taskflow_ns_per_node", quantile(raw, 0.5)},
                               {"raw_taskflow_ns_per_node_p95", quantile(raw, 0.95)},
                               {"ratio", ratio},
                               {"ratio_of_pairs", quantile(ratios, 0.5)}}));
  } else {
    std::cout << std::left << std::setw(10) << shape.name << std::right << std::setw(9) << shape.num_nodes
              << std::setw(9) << shape.edges.size() << std::fixed << std::setprecision(1) << std::setw(14)
              << quantile(ours, 0.5) << std::setw(12) << quantile(ours, 0.95) << std::setw(19) << quantile(raw, 0.5)
              << std::setprecision(3) << std::setw(9) << ratio << std::endl;
  }
}

// The cost of recording a step.
void bench_record(const Shape& shape, int threads, const OverheadOptions& options) {
  LoopbackWorld world(1);
  Executor executor({.threads = threads});
  const Program program(token_graph(shape), world);
  Recorder recorder;
  const auto [with, without] =
      alternate([&] { executor.run(program, &recorder); }, [&] { executor.run(program); }, shape.num_nodes, options);
  const Timeline timeline = recorder.timeline();
  for (const auto& [before, after] : shape.edges) {
    if (!timeline.nodes[before].ran() || timeline.nodes[after].begin_s < timeline.nodes[before].end_s) {
      throw Error(ErrorKind::run, str("bench overhead: in '", shape.name, "' node ", after,
                                      " was recorded to begin before node ", before, " had ended"));
    }
  }
  std::vector<double> extra;
  for (std::size_t i = 0; i < with.size(); ++i) extra.push_back(with[i] - without[i]);
  if (options.json) {
    cli::print_line(json_line({{"type", "record"},
                               {"graph", shape.name},
                               {"nodes", shape.num_nodes},
                               {"threads", threads},
                               {"pairs", with.size()},
                               {"ns_per_node", quantile(with, 0.5)},
                               {"unrecorded_ns_per_node", quantile(without, 0.5)},
                               {"extra_ns_per_node", quantile(extra, 0.5)}}));
  } else {
    std::cout << std::left << std::setw(10) << shape.name << std::right << std::setw(9) << shape.num_nodes << std::fixed
              << std::setprecision(1) << std::setw(18) << quantile(with, 0.5) << std::setw(16) << quantile(without, 0.5)
              << std::setw(15) << quantile(extra, 0.5) << std::endl;
  }
}

// The cost of building a graph: random DAGs with two edges per node.
void bench_build(std::uint32_t nodes, const OverheadOptions& options) {
  const Shape shape = random_dag(nodes, 2 * nodes, 1);
  const int repeats = options.dry_run ? 1 : nodes >= 1'000'000 ? 3 : nodes >= 100'000 ? 7 : 21;
  LoopbackWorld world(1);
  std::vector<double> total, build, derive, lower, raw;
  for (int i = 0; i < repeats; ++i) {
    std::optional<Graph> graph;
    std::optional<Program> program;
    RawTaskflow taskflow;
    build.push_back(nanoseconds([&] { graph = token_graph(shape); }) / nodes);
    derive.push_back(nanoseconds([&] { (void)graph->edges(); }) / nodes);
    lower.push_back(nanoseconds([&] { program.emplace(*graph, world); }) / nodes);
    total.push_back(build.back() + derive.back() + lower.back());
    if (i == 0) check_edges(shape, *graph, *program);
    program.reset();
    graph.reset();
    raw.push_back(nanoseconds([&] { taskflow.build(shape); }) / nodes);
  }
  if (options.json) {
    cli::print_line(json_line({{"type", "build"},
                               {"nodes", nodes},
                               {"edges", shape.edges.size()},
                               {"repeats", repeats},
                               {"ns_per_node", quantile(total, 0.5)},
                               {"add_ns_per_node", quantile(build, 0.5)},
                               {"derive_ns_per_node", quantile(derive, 0.5)},
                               {"lower_ns_per_node", quantile(lower, 0.5)},
                               {"raw_taskflow_ns_per_node", quantile(raw, 0.5)}}));
  } else {
    std::cout << std::setw(9) << nodes << std::fixed << std::setprecision(0) << std::setw(13) << quantile(total, 0.5)
              << std::setw(8) << quantile(build, 0.5) << std::setw(8) << quantile(derive, 0.5) << std::setw(8)
              << quantile(lower, 0.5) << std::setw(19) << quantile(raw, 0.5) << std::endl;
  }
}

}  // namespace

void overhead(const OverheadOptions& options) {
  const std::uint32_t nodes       = options.dry_run ? std::min(options.nodes, 1'000u) : options.nodes;
  const auto side                 = static_cast<std::uint32_t>(std::lround(std::sqrt(static_cast<double>(nodes))));
  const std::vector<Shape> shapes = {chain(nodes), wide(nodes), wavefront(side), random_dag(nodes, 2 * nodes, 1)};
  for (const int threads : options.threads) {
    if (!options.json) {
      std::cout << (threads == options.threads.front() ? "" : "\n") << "Running empty nodes, " << threads
                << " threads, median of " << (options.dry_run ? 1 : options.pairs)
                << " alternating pairs\ngraph         nodes    edges  ours ns/node      p95 ns  Taskflow ns/node    "
                   "ratio\n";
    }
    for (const Shape& shape : shapes) bench_run(shape, threads, options);
    if (!options.json) {
      std::cout << "\nRecording the times of empty nodes, " << threads
                << " threads\ngraph         nodes  recorded ns/node  without ns/node  extra ns/node\n";
    }
    for (const Shape& shape : shapes) bench_record(shape, threads, options);
  }
  if (!options.json) {
    std::cout << "\nBuilding a random graph, two edges per node, ns per node\n    nodes        total     add  derive   "
                 "lower   Taskflow alone\n";
  }
  for (const std::uint32_t size : options.build_nodes) {
    bench_build(options.dry_run ? std::min(size, 1'000u) : size, options);
  }

  if (!options.json) {
    std::cout << "\nWhole graphs\nuse       graph         nodes    edges  ranks    seconds   ns/node    peak MiB\n";
  }
  const std::uint32_t largest = *std::max_element(options.build_nodes.begin(), options.build_nodes.end());
  const std::uint32_t size    = options.dry_run ? std::min(largest, 1'000u) : largest;
  bench_uses("random", token_graph(random_dag(size, 2 * size, 1)), options);
  const int layers = std::max(1, static_cast<int>(size / (6 * 64)));  // six nodes per layer and rank
  bench_uses("sharded", sharded_step({.ranks = 64, .layers = layers, .width = 8, .batch = 1}).graph, options);
}

}  // namespace stepgraph::bench
