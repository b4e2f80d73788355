// One process of a world of processes: world_process BACKEND TASK [ARGUMENT]. Its place is in the environment.
//
// conformance [LARGE_BYTES [ONLY]]: runs the conformance suite, or the cases with this in their names. Prints errors,
// or "passed".
//
// sums STEPS: runs that many all-reduces, and compares each with the numbers. Prints "begins RANK PID", then "done".
//
// aborts TIMES: aborts an all-reduce in one process after another, after some good ones, which are compared with the
// numbers. Prints "done".
//
// hang FILE: begins the file FILERANK, and never ends. Prints "begins RANK PID".
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "backends/init_world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "engine/run/executor.hpp"
#include "tests/support/conformance/one_collective.hpp"
#include "tests/support/conformance/world_conformance.hpp"
#include "tests/support/scale.hpp"

namespace {

namespace sg = stepgraph;

int conformance(sg::ProcessWorld& world, bool rank_order, std::int64_t large_bytes, const char* only) {
  const std::vector<std::string> failures =
      sg::testing::world_conformance(world, {.rank_order   = rank_order,
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

// An all-reduce whose inputs change from step to step. All sums are integers that f32 has, so their bits do not depend
// on the order of additions.
class SumOfSteps {
 public:
  SumOfSteps(sg::ProcessWorld& world, std::int64_t elements)
      : rank_(world.place().rank),
        num_ranks_(world.num_ranks()),
        program_(
            slice(sg::testing::one_collective({.ranks = num_ranks_, .elements = elements}).graph, world.local_ranks()),
            world),
        values_(static_cast<std::size_t>(elements)) {}

  [[nodiscard]] const sg::Program& program() const { return program_; }

  // Throws if the sums of the step are wrong.
  void run(sg::Executor& executor, long step) {
    const auto shift = static_cast<float>(step % 16), n = static_cast<float>(num_ranks_);
    fill(1, shift + static_cast<float>(rank_));
    program_.memory().write(in, std::span<const float>(values_));
    executor.run(program_);
    fill(n, n * shift + n * (n - 1) / 2);
    std::vector<float> found(values_.size());
    program_.memory().read(out, std::span(found));
    if (std::memcmp(found.data(), values_.data(), found.size() * sizeof(float)) == 0) return;
    const auto [is, wanted] = std::mismatch(found.begin(), found.end(), values_.begin());
    throw sg::Error(sg::ErrorKind::backend, sg::str("all-reduce of step ", step, ": element ", is - found.begin(),
                                                    " is ", *is, " (", *wanted, ")"));
  }

 private:
  static constexpr sg::Buffer in{0}, out{1};  // of the one rank in this process

  // Values are scale * (0 to 250) + shift, over and over.
  void fill(float scale, float shift) {
    constexpr std::size_t period = 251;
    for (std::size_t i = 0; i < std::min(period, values_.size()); ++i)
      values_[i] = scale * static_cast<float>(i) + shift;
    for (std::size_t done = period; done < values_.size(); done *= 2)
      std::copy_n(values_.begin(), std::min(done, values_.size() - done),
                  values_.begin() + static_cast<std::ptrdiff_t>(done));
  }

  int rank_, num_ranks_;
  sg::Program program_;
  std::vector<float> values_;
};

int sums(sg::ProcessWorld& world, long steps) {
  SumOfSteps sum(world, 1 << 18);
  sg::Executor executor({.threads = 1, .waiting_lanes = 1});
  // For the process that will kill it; in one piece.
  std::cout << sg::str("begins ", world.place().rank, " ", ::getpid(), "\n") << std::flush;
  for (long step = 0; step < steps; ++step) sum.run(executor, step);
  std::cout << "done\n";
  return 0;
}

int aborts(sg::ProcessWorld& world, long times) {
  constexpr int good_steps = 5;  // of which some are captured on a GPU
  SumOfSteps sum(world, 1 << 24);
  sg::Executor executor({.threads = 1, .waiting_lanes = 1});
  const int rank = world.place().rank;
  for (long time = 0; time <= times; ++time) {
    for (int step = 0; step < good_steps; ++step) sum.run(executor, time * good_steps + step);
    if (time == times) break;
    try {
      sg::Run run = executor.start(sum.program());
      if (time % world.num_ranks() == rank) {
        run.cancel("aborted by the test");
        run.get();
        std::cerr << "the step was not aborted\n";
        return 1;
      }
      run.get();
      // It had ended before the abort, which then ends the next step.
      executor.run(sum.program());
      std::cerr << "no step was aborted\n";
      return 1;
    } catch (const sg::Error& error) {
      if (std::string(error.what()).find("aborted") != std::string::npos) continue;
      throw;
    }
  }
  std::cout << "done\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string backend = argc > 1 ? argv[1] : "", task = argc > 2 ? argv[2] : "";
  const long argument = argc > 3 ? std::atol(argv[3]) : 0;
  // mpirun sends SIGTERM to all processes when one has ended. They report why first, and end by themselves, as those of
  // the stepgraph command do.
  if (backend == "mpi") std::signal(SIGTERM, SIG_IGN);
  sg::InitOptions options;
  if (const char* const timeout = std::getenv("TIMEOUT_MS"); timeout != nullptr)
    options.world.timeout = std::chrono::milliseconds(std::atol(timeout));
  if (const char* const folder = std::getenv("FLIGHT"); folder != nullptr) options.world.flight_folder = folder;
  const char* const exact = std::getenv("EXACT");
  options.nccl.exact      = exact != nullptr && exact == std::string_view("1");
  // Processes over NCCL share the first GPU.
  if (std::getenv("OWN_GPUS") == nullptr) options.nccl.devices.assign(64, 0);
  std::unique_ptr<sg::ProcessWorld> world;
  try {
    world = sg::init_world(backend, options);
    if (task == "conformance")
      return conformance(*world, backend != "nccl" || options.nccl.exact, argument > 0 ? argument : 1'000'000,
                         argc > 4 ? argv[4] : "");
    if (task == "sums") return sums(*world, argument);
    if (task == "aborts") return aborts(*world, argument);
    if (task == "hang" && argc > 3) return hang(*world, argv[3]);
    std::cerr << "world_process: unknown task '" << task << "'\n";
    return 2;
  } catch (const sg::Error& error) {
    std::cerr << "error: " << error.what() << "\n";
    if (world) world->fail(error.what());
    return error.kind() == sg::ErrorKind::config ? 2 : 3;
  }
}
