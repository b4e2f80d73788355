#include "tools/bench/overhead.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iostream>
#include <optional>
#include <thread>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/graph/edges.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/recorder.hpp"
#include "engine/simulate/machine.hpp"
#include "engine/simulate/simulate.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/files/json_value.hpp"
#include "tools/bench/raw_taskflow.hpp"
#include "tools/bench/shapes.hpp"
#include "tools/examples/sharded_step.hpp"
#include "tools/stepgraph/output.hpp"

namespace stepgraph::bench {
namespace {

double nanoseconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
}

// Taskflow prepares all nodes on the calling thread. A run is 1.5 times as fast if its worker shares a core, and so a
// cache, with the caller, and the kernel keeps the placement that a process began with. So a sample is several runs
// with the caller on each core in turn: ours and Taskflow's get the same mixture.
class MovingThread {
 public:
  MovingThread() { sched_getaffinity(0, sizeof allowed_, &allowed_); }
  ~MovingThread() { sched_setaffinity(0, sizeof allowed_, &allowed_); }
  MovingThread(const MovingThread&)            = delete;
  MovingThread& operator=(const MovingThread&) = delete;

  void move(int turn) const {
    int skip = turn % std::max(1, CPU_COUNT(&allowed_));
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed_) || skip-- > 0) continue;
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      sched_setaffinity(0, sizeof one, &one);
      return;
    }
  }

 private:
  cpu_set_t allowed_{};
};

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

// Times of two alternatives in nanoseconds per node. They run in turn, each first in every other pair.
struct Pairs {
  std::vector<double> first, second;
};
Pairs alternate(const std::function<void()>& first, const std::function<void()>& second, std::uint32_t nodes,
                const OverheadOptions& options) {
  const int warm_ups = options.dry_run ? 0 : 3, pairs = options.dry_run ? 1 : options.pairs;
  const int runs = options.dry_run ? 1 : 8;
  MovingThread caller;
  const auto sample = [&](const std::function<void()>& run) {
    double total = 0;
    for (int k = 0; k < runs; ++k) {
      caller.move(k);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      total += nanoseconds(run);
    }
    return total / runs / nodes;
  };
  Pairs out;
  for (int i = -warm_ups; i < pairs; ++i) {
    double a = 0, b = 0;
    if (i % 2 == 0) a = sample(first);
    b = sample(second);
    if (i % 2 != 0) a = sample(first);
    if (i < 0) continue;
    out.first.push_back(a);
    out.second.push_back(b);
  }
  return out;
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

// A line of /proc/self/status, in bytes.
std::int64_t process_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field + ":", 0) == 0) return std::stoll(line.substr(field.size() + 1)) * 1024;
  }
  return 0;
}

// Times one use of a whole graph. Its edges are derived before.
void bench_use(const char* use, const std::string& name, const Graph& graph, const OverheadOptions& options,
               const std::function<void()>& work) {
  (void)graph.edges();
  std::ofstream("/proc/self/clear_refs") << 5;  // resets the peak of resident memory
  const double time       = nanoseconds(work);
  const std::int64_t peak = process_bytes("VmHWM");  // of the whole process, the graph and its edges included
  if (options.json) {
    cli::print_line(json_line({{"type", use},
                               {"graph", name},
                               {"nodes", graph.num_nodes()},
                               {"ranks", graph.num_ranks()},
                               {"edges", graph.edges().preds.size()},
                               {"seconds", time / 1e9},
                               {"ns_per_node", time / graph.num_nodes()},
                               {"peak_bytes", peak}}));
  } else {
    std::cout << std::left << std::setw(10) << use << std::setw(10) << name << std::right << std::setw(9)
              << graph.num_nodes() << std::setw(9) << graph.edges().preds.size() << std::setw(7) << graph.num_ranks()
              << std::fixed << std::setprecision(2) << std::setw(11) << time / 1e9 << std::setprecision(0)
              << std::setw(10) << time / graph.num_nodes() << std::setw(12) << static_cast<double>(peak) / (1 << 20)
              << std::endl;
  }
}

void bench_uses(const std::string& name, const Graph& graph, const OverheadOptions& options) {
  bench_use("verify", name, graph, options, [&] {
    const std::vector<Finding> findings = find_flaws(graph);
    if (findings.empty()) return;
    throw Error(ErrorKind::run,
                str("bench overhead: the verifier reports a flaw in '", name, "': ", findings[0].message));
  });
  Machine machine = loopback_machine({.ranks = graph.num_ranks(), .threads = options.threads.front()});
  for (const NodeKind kind : {NodeKind::compute, NodeKind::communicate, NodeKind::copy, NodeKind::host})
    machine.rate(kind, {.overhead_s = 1e-6});
  bench_use("simulate", name, graph, options, [&] { (void)simulate(graph, machine); });
  bench_use("plan", name, graph, options, [&] { (void)plan_memory(graph, {.machine = &machine}); });
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
