// What train prints: lines of steps, the status line of a terminal, and the config that it ran with.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstdlib>

#include "engine/base/error.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/processes/pseudo_terminal.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::json_lines;
using sg::testing::SmallRun;

namespace {

// What a command writes to a terminal, with stdout there too or in a file.
std::string on_terminal(const std::string& command, const std::string& out = "") {
  sg::testing::TerminalForStderr terminal(90);
  const int status = std::system(("ASAN_OPTIONS=detect_leaks=0 " + command + (out.empty() ? " 1>&2" : " > " + out)).c_str());
  CHECK(status == 0);
  return terminal.written();
}

int num_lines_with(const std::string& text, const std::string& word) {
  int count = 0;
  for (auto at = text.find(word); at != text.npos; at = text.find(word, at + 1)) ++count;
  return count;
}

}  // namespace

TEST_CASE("on a terminal train shows one status line, and the line of the last step", "[tools][train]") {
  const SmallRun small;
  const std::string train = sg::testing::command_path() + " train " + small.config();
  const std::string alone = on_terminal(train);
  CHECK(num_lines_with(alone, "  grad_norm ") == 1);
  CHECK_THAT(alone, ContainsSubstring("train 12/12 [") && ContainsSubstring("  norm ") &&
                        ContainsSubstring("tokens/s") && ContainsSubstring("step 11  loss ") &&
                        ContainsSubstring("\n12 steps, 384 tokens in "));
  CHECK(sg::testing::last_line(alone).empty());
  const std::string some = on_terminal(train + " --log-every 5");
  for (const char* step : {"0", "5", "10", "11"})
    CHECK_THAT(some, ContainsSubstring(sg::str("step ", step, "  loss ")));
  CHECK_THAT(some, !ContainsSubstring("step 1  loss ") && !ContainsSubstring("step 9  loss "));

  // A file has all lines. The status line stays on the terminal.
  const std::string status = on_terminal(train, small.path("out"));
  CHECK_THAT(status, ContainsSubstring("train 12/12 [") && ContainsSubstring("loss ") && ContainsSubstring("tokens/s"));
  CHECK(sg::testing::last_line(status).empty());
  const std::string out = sg::testing::file_bytes(small.path("out"));
  CHECK(out.find('\x1b') == std::string::npos);
  for (int step = 0; step < 12; ++step) CHECK_THAT(out, ContainsSubstring(sg::str("step ", step, "  loss ")));
}

TEST_CASE("the option --log-every leaves out the lines between", "[tools][train]") {
  const SmallRun small;
  std::vector<std::int64_t> steps;
  for (const auto& line : json_lines(small.run("train", "--json --log-every 4").out))
    if (line.at("type") == "step") steps.push_back(line.at("step").as_integer());
  CHECK(steps == std::vector<std::int64_t>{0, 4, 8, 11});
}

TEST_CASE("the config line of a run is a config that repeats the run", "[tools][train]") {
  const SmallRun small;
  REQUIRE(sg::testing::run_stepgraph("schedule --kind 1f1b --stages 2 --microbatches 4 --csv " + small.path("s.csv"))
              .exit_code == 0);
  REQUIRE(small.run("train", "--steps 1 --save " + small.path("model")).exit_code == 0);
  for (const std::string& more : sg::testing::some_of(std::vector<std::string>{
           "--set seed=7 --set layout.pp=2 --set pipeline.schedule=zb-h1", "--threads 2 --set precision.param=fp16",
           "--set layout.dp=2 --set shard.strategy=full --set shard.reduce=each --set recompute=full",
           "--set optimizer.kind=sgd --set layout.tp=2 --set layout.sequence_parallel=true",
           "--set pipeline.schedule=" + small.path("s.csv") + " --set layout.pp=2",
           "--set 'model={\"load\": \"" + small.path("model") + "\", \"dropout\": 0.1}' --set precision.param=bf16",
           "--set memory.preset=aggressive --set layout.dp=2 --set seed=18446744073709551615"})) {
    CAPTURE(more);
    const auto first = small.run("train", "--json --steps 3 " + more);
    CAPTURE(first.err);
    REQUIRE(first.exit_code == 0);
    const std::string line = first.out.substr(0, first.out.find('\n') + 1);
    std::ofstream(small.path("again.json")) << line;
    const auto again = sg::testing::run_stepgraph("train " + small.path("again.json") + " --json --steps 3");
    CAPTURE(again.err);
    REQUIRE(again.exit_code == 0);
    CHECK(again.out.substr(0, again.out.find('\n') + 1) == line);
    const auto losses = [](const std::string& out) {
      std::vector<std::string> found;
      for (const auto& step : json_lines(out))
        if (step.at("type") == "step") found.push_back(sg::str(step.at("loss"), " ", step.at("grad_norm")));
      return found;
    };
    CHECK(losses(first.out).size() == 3);
    CHECK(losses(again.out) == losses(first.out));
  }
  // Another type is no config.
  CHECK_THAT(small.run("verify", "--set type=plan").err, ContainsSubstring("type: unknown key"));
}
