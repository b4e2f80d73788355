// One process of a world of processes: world_process BACKEND TASK [ARGUMENT]. Its place is in the environment.
//
// conformance [LARGE_BYTES [ONLY]]: runs the conformance suite, or the cases with this in their names. Prints errors,
// or "passed".
//
// sums STEPS: runs that many all-reduces. Prints "begins RANK PID", then "done".
//
// hang FILE: begins the file FILERANK, and never ends. Prints "begins RANK PID".
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "backends/init_world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "engine/run/executor.hpp"
#include "tests/support/conformance/one_collective.hpp"
#include "tests/support/conformance/world_conformance.hpp"
#include "tests/support/scale.hpp"

namespace {

namespace sg = stepgraph;

int conformance(sg::ProcessWorld& world, std::int64_t large_bytes, const char* only) {
  const std::vector<std::string> failures =
      sg::testing::world_conformance(world, {.rank_order   = true,
                                             .large_bytes  = large_bytes,
                                             .num_random   = sg::testing::cases(4),
                                             .threads      = 1,
                                             .step_timeout = std::chrono::seconds(40) * sg::testing::slowness(),
                                             .only         = only});
  for (const std::string& failure : failures) std::cerr << failure << "\n";
  if (failures.empty()) std::cout << "passed\n" << std::flush;
  return failures.empty() ? 0 : 1;
}

// Begins a file, and never ends.
int hang(const sg::ProcessWorld& world, const std::string& path) {
  sg::OutputFile file(path + std::to_string(world.place().rank));
  std::cout << sg::str("begins ", world.place().rank, " ", ::getpid(), "\n") << std::flush;
  for (;;) ::pause();
}

int sums(sg::ProcessWorld& world, long steps) {
  const sg::Graph whole = sg::testing::one_collective({.ranks = world.num_ranks(), .elements = 1 << 18}).graph;
  const sg::Program program(slice(whole, world.local_ranks()), world);
  sg::Executor executor({.threads = 1, .waiting_lanes = 1});
  // For the process that will kill it; in one piece.
  std::cout << sg::str("begins ", world.place().rank, " ", ::getpid(), "\n") << std::flush;
  for (long step = 0; step < steps; ++step) executor.run(program);
  std::cout << "done\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string backend = argc > 1 ? argv[1] : "", task = argc > 2 ? argv[2] : "";
  const long argument = argc > 3 ? std::atol(argv[3]) : 0;
  sg::InitOptions options;
  if (const char* const timeout = std::getenv("TIMEOUT_MS"); timeout != nullptr)
    options.world.timeout = std::chrono::milliseconds(std::atol(timeout));
  if (const char* const folder = std::getenv("FLIGHT"); folder != nullptr) options.world.flight_folder = folder;
  std::unique_ptr<sg::ProcessWorld> world;
  try {
    world = sg::init_world(backend, options);
    if (task == "conformance") return conformance(*world, argument > 0 ? argument : 1'000'000, argc > 4 ? argv[4] : "");
    if (task == "sums") return sums(*world, argument);
    if (task == "hang" && argc > 3) return hang(*world, argv[3]);
    std::cerr << "world_process: unknown task '" << task << "'\n";
    return 2;
  } catch (const sg::Error& error) {
    std::cerr << "error: " << error.what() << "\n";
    if (world) world->fail(error.what());
    return error.kind() == sg::ErrorKind::config ? 2 : 3;
  }
}
