#include "tools/bench/overhead/uses.hpp"

#include <cstdint>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iostream>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/simulate/machine.hpp"
#include "engine/simulate/simulate.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/files/json_value.hpp"
#include "tools/bench/overhead/overhead.hpp"
#include "tools/bench/overhead/pairs.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {
namespace {

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

}  // namespace

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

}  // namespace stepgraph::bench
