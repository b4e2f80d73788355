#include "tests/support/processes/launched.hpp"

#include <catch2/catch_test_macros.hpp>

#include "backends/init_world.hpp"
#include "engine/base/error.hpp"
#include "tests/support/processes/command_run.hpp"

namespace stepgraph::testing {

void require_backend(const std::string& backend) {
  if (!has_process_backend(backend)) SKIP("this build has no " << backend);
  if (backend != "mpi") return;
  if (run_bash("command -v mpirun").exit_code != 0) SKIP("there is no mpirun");
  if (is_sanitized()) SKIP("MPI takes long in sanitized builds");
}

Outcome run_over(const std::string& backend, int size, const std::string& command, int limit_s) {
  const std::string launcher =
      backend == "mpi" ? str("env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe -n ",
                             size, " ", command_path(), " ")
                       : str(command_path(), " launch -n ", size, " -- ");
  return run_bash(str("cd /tmp && STEPGRAPH_FLIGHT= timeout ", limit_s * slowness(), " ", launcher, command,
                      " --set backend=", backend));
}

std::string without_times(const std::string& out) {
  std::string text;
  for (JsonValue line : json_lines(out)) {
    const bool plan = line.at("type") == "plan";
    for (const char* name : {"backend", "seconds", "tokens_per_s", "workers_busy", "communication_hidden",
                             "bubble_rate", "planned_bytes", "used_bytes", "transfer_s", "exposed_s"})
      line.erase(name);
    for (const char* name : {"edges", "reuse_edges", "peak_bytes", "host_bytes", "disk_bytes"})
      if (plan) line.erase(name);
    text += json_line(line) + "\n";
  }
  return text;
}

}  // namespace stepgraph::testing
