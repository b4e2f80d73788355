// Commands with backend cuda in a build or on a machine without CUDA.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "tests/support/processes/command_run.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::run_stepgraph;
using sg::testing::SmallRun;

TEST_CASE("without a device, backend cuda exits with 3 and says what is missing", "[tools][train][refuses]") {
  const std::string version = run_stepgraph("--version").out;
  if (version.find("compute capability") != version.npos) SKIP("there is a device here");
  const bool built = version.find("not built in") == version.npos;
  const std::string why =
      built ? "cuda: counting devices: " : "backend cuda: not in this build (configure with STEPGRAPH_WITH_CUDA=ON, ";
  const SmallRun small;
  for (const std::string& arguments : sg::testing::some_of(std::vector<std::string>{
           "train " + small.config() + " --set backend=cuda --steps 1",
           "train " + small.config() + " --set backend=cuda --steps 1 --json",
           "eval " + small.config() + " --set backend=cuda",
           "generate " + small.config() + " --set backend=cuda --prompt 1",
           "bench train --backend cuda --models tiny --dry-run --json",
           "bench capture --model tiny --dry-run --json",
           "bench copy --dry-run --json",
       })) {
    CAPTURE(arguments);
    const auto outcome = run_stepgraph(arguments);
    CHECK(outcome.exit_code == 3);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring("stepgraph " + arguments.substr(0, arguments.find(' '))) &&
                                ContainsSubstring(why) && ContainsSubstring("or use backend loopback)"));
  }
  // Commands that need no device still work.
  CHECK(small.run("verify", "--set backend=cuda").exit_code == 0);
}

TEST_CASE("a list of devices that is none, or that the backend has no use for, is refused", "[tools][train][refuses]") {
  const SmallRun small;
  const auto train = [&](const std::string& rest) { return "train " + small.config() + " --steps 1 " + rest; };
  for (const auto& [arguments, why] : sg::testing::some_of(std::vector<std::pair<std::string, std::string>>{
           {train("--devices 1"), "devices: with backend loopback, whose ranks are not on GPUs (cuda or nccl)"},
           {train("--set backend=cuda --devices 0,1,2"), "devices: has 3 devices, but the layout has "},
           {train("--set backend=cuda --devices 0,x"), "--devices: '0,x' is no list of devices (as in 0,1; or all)"},
           {train("--set backend=cuda --devices 0,"), "--devices: '0,' is no list of devices"},
           {"eval " + small.config() + " --devices all", "devices: with backend loopback"},
           {"generate " + small.config() + " --prompt 1 --devices 1", "devices: with backend loopback"},
           {"bench train --devices 0 --dry-run",
            "--devices: with backend loopback, whose ranks are not on GPUs (cuda or nccl)"},
           {"bench train --backend cuda --devices -1 --dry-run", "--devices: '-1' is no list of devices"},
       })) {
    CAPTURE(arguments);
    const auto outcome = run_stepgraph(arguments);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring(why));
  }
}
