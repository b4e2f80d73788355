#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/stepgraph/command_line.hpp"

// Options of `stepgraph bench`.
namespace stepgraph::cli {

// Options that all benchmarks have.
template <class Options>
void add_common(Command command, Options& options) {
  command.flag("--dry-run", options.dry_run, "Run one small iteration: a smoke test, not a measurement");
  command.flag("--json", options.json, "Print JSON lines and nothing else");
}

// What a benchmark does. Before it, instructions that STEPGRAPH_INSTRUCTIONS names wrongly are refused.
void run_bench(Command command, std::function<void()> work);

void add_threads(Command command, int& threads);
void add_backend(Command command, std::string& backend);  // loopback or cuda

// Options of backends on GPUs.
struct GpuOptions {
  std::optional<std::string> devices = {};
  bool exact                         = false;
};
[[nodiscard]] std::shared_ptr<GpuOptions> add_gpu_options(Command command);
// The devices that a backend uses. Throws Error(config) if the options have no effect with it.
[[nodiscard]] std::vector<int> devices_of(const GpuOptions& gpus, const std::string& backend, std::vector<int> usual);
template <class Options>
void apply(const GpuOptions& gpus, Options& options) {
  options.devices = devices_of(gpus, options.backend, std::move(options.devices));
  options.exact   = gpus.exact;
}

}  // namespace stepgraph::cli
