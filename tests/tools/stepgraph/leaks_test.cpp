// Leaks of the commands, in the asan build. Other tests of commands skip the search, which takes seconds per process.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <fstream>

#include "engine/base/error.hpp"
#include "graphs/predict/calibration.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/sanitizer.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::SmallRun;

namespace {

void need_asan() {
  if (sg::testing::sanitizer() != sg::testing::Sanitizer::address) SKIP("needs the asan build");
}

sg::testing::Outcome run_searched(const std::string& command) {
  return sg::testing::run_command("ASAN_OPTIONS=detect_leaks=1 " + command);
}

// Commands that run one after another in one process. Each search for leaks takes seconds, so there is one for all.
class Commands {
 public:
  void add(const std::string& arguments, int exit_code = 0) { lines_ += sg::str(exit_code, " ", arguments, "\n"); }
  void check_no_leak(const std::string& file) const {
    std::ofstream(file) << lines_;
    const auto outcome = run_searched(sg::testing::command_sequence_path() + " " + file);
    CAPTURE(lines_, outcome.err);
    CHECK(outcome.exit_code == 0);
    CHECK_THAT(outcome.err, !ContainsSubstring("LeakSanitizer"));
  }

 private:
  std::string lines_;
};

}  // namespace

TEST_CASE("a planted leak is found", "[tools][leaks]") {
  need_asan();
  const auto outcome = run_searched(sg::testing::planted_race_path() + " leak");
  CHECK(outcome.exit_code != 0);
  CHECK_THAT(outcome.err, ContainsSubstring("LeakSanitizer"));
}

TEST_CASE("commands on a config leave nothing allocated", "[tools][leaks]") {
  need_asan();
  const SmallRun small;
  Commands commands;
  const std::string all_parallel = " --set layout.dp=2 --set layout.tp=2 --set layout.pp=2";
  commands.add("train " + small.config() + all_parallel + " --steps 2 --save " + small.path("model") + " --trace " +
               small.path("trace.json"));
  commands.add("eval " + small.config() + " --steps 1");
  commands.add("generate " + small.config() + " --prompt 7 --tokens 2");
  commands.add("graph " + small.config() + all_parallel);
  commands.add("verify " + small.config() + all_parallel);
  commands.add("plan-memory " + small.config() + all_parallel);
  sg::Calibration machine{.host = sg::host_name(), .cores = 2, .threads = 1};
  machine.ops["linear"] = {{1e6, 1e4, 1e-3, 1e-3}};
  sg::save_calibration(machine, small.path("machine.json"));
  commands.add("simulate " + small.config() + all_parallel + " --machine " + small.path("machine.json"));
  commands.add("train " + small.config() + " --set shard.strategy=full --set layout.dp=2 --steps 1");
  commands.add("train " + small.config() + " --set layout.tp=3", 2);  // refused
  commands.check_no_leak(small.path("commands"));
}

TEST_CASE("commands without a config leave nothing allocated", "[tools][leaks]") {
  need_asan();
  const SmallRun small;
  Commands commands;
  commands.add("--version");
  commands.add("schedule --kind 1f1b --stages 4 --microbatches 8");
  for (const char* bench : {"overhead --nodes 100", "collectives --sizes 64 --ranks 2", "adam --elements 1000",
                            "train --models tiny --layouts 2x1x1", "predict --models tiny",
                            "capture --model tiny --backend loopback", "copy --backend loopback"})
    commands.add(sg::str("bench ", bench, " --dry-run --json"));
  commands.add("nothing of that name", 2);
  commands.check_no_leak(small.path("commands"));
}
