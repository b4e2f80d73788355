// Other tests of commands do without a search for leaks, which takes seconds for each process; here every command has
// one.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/error.hpp"
#include "graphs/calibration.hpp"
#include "tests/support/command_run.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::run_command;
using sg::testing::SmallRun;

namespace {

// A leak is told on stderr, and changes an exit code of 0.
void check_no_leak(const std::string& arguments, int exit_code = 0) {
  CAPTURE(arguments);
  const auto outcome =
      run_command(sg::str("ASAN_OPTIONS=detect_leaks=1 ", sg::testing::command_path(), " ", arguments));
  CAPTURE(outcome.err);
  CHECK(outcome.exit_code == exit_code);
  CHECK_THAT(outcome.err, !ContainsSubstring("LeakSanitizer"));
}

}  // namespace

TEST_CASE("commands on a config leave nothing allocated", "[tools][leaks]") {
  const SmallRun small;
  const std::string all_parallel = " --set layout.dp=2 --set layout.tp=2 --set layout.pp=2";
  check_no_leak("train " + small.config() + all_parallel + " --steps 2 --save " + small.path("model") + " --trace " +
                small.path("trace.json"));
  check_no_leak("eval " + small.config() + " --steps 1");
  check_no_leak("generate " + small.config() + " --prompt 7 --tokens 2");
  check_no_leak("graph " + small.config() + all_parallel);
  check_no_leak("verify " + small.config() + all_parallel);
  check_no_leak("plan-memory " + small.config() + all_parallel);
  sg::Calibration machine{.host = sg::host_name(), .cores = 2, .threads = 1};
  machine.ops["linear"] = {{1e6, 1e4, 1e-3, 1e-3}};
  sg::save_calibration(machine, small.path("machine.json"));
  check_no_leak("simulate " + small.config() + all_parallel + " --machine " + small.path("machine.json"));
  check_no_leak("train " + small.config() + " --set shard.strategy=full --set layout.dp=2 --steps 1");
  check_no_leak("train " + small.config() + " --set layout.tp=3", 2);  // refused
}

TEST_CASE("commands without a config leave nothing allocated", "[tools][leaks]") {
  check_no_leak("--version");
  check_no_leak("schedule --kind 1f1b --stages 4 --microbatches 8");
  check_no_leak("bench train --models tiny --layouts 2x1x1 --dry-run --json");
  check_no_leak("nothing of that name", 2);
}
