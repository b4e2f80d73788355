#include "tools/stepgraph/commands/bench_options.hpp"

#include <utility>

#include "engine/base/error.hpp"
#include "ops/cpu/instructions.hpp"
#include "tools/stepgraph/session/config_options.hpp"

namespace stepgraph::cli {

void run_bench(Command command, std::function<void()> work) {
  command.run([work = std::move(work)] {
    (void)cpu::product_instructions();
    work();
  });
}

void add_threads(Command command, int& threads) {
  command.option("--threads", threads, "Threads, also for the baseline").between(1, 1024);
}

void add_backend(Command command, std::string& backend) {
  command.option("--backend", backend, "Backend").one_of({"loopback", "cuda"});
}

std::shared_ptr<GpuOptions> add_gpu_options(Command command) {
  auto options = std::make_shared<GpuOptions>();
  add_devices_option(command, options->devices);
  command.flag("--exact", options->exact, "With backend nccl: sums in rank order, with the bits of one process");
  return options;
}

std::vector<int> devices_of(const GpuOptions& gpus, const std::string& backend, std::vector<int> usual) {
  if (gpus.devices && backend != "cuda" && backend != "nccl")
    throw Error(ErrorKind::config,
                str("--devices: with backend ", backend, ", whose ranks are not on GPUs (cuda or nccl)"));
  if (gpus.exact && backend != "nccl")
    throw Error(ErrorKind::config, str("--exact: with backend ", backend, ", which always adds in rank order (nccl)"));
  if (gpus.devices) return parse_devices(*gpus.devices);
  if (backend == "nccl") return {};  // all
  return usual;
}

}  // namespace stepgraph::cli
