// train and the other commands with updates that are applied some steps later.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/error.hpp"
#include "graphs/predict/calibration.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/processes/launched.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::json_lines;
using sg::testing::SmallRun;

namespace {

std::string stale(int steps) { return sg::str(" --set update.mode=stale --set update.max_staleness=", steps); }

// "STEP LOSS NORM" of each step.
std::vector<std::string> steps_of(const std::string& out) {
  std::vector<std::string> steps;
  for (const auto& line : json_lines(out))
    if (line.at("type") == "step")
      steps.push_back(sg::str(line.at("step"), " ", line.at("loss"), " ", line.at("grad_norm")));
  return steps;
}

}  // namespace

TEST_CASE("train prints a line for each stale step, in order and with the norm of its own gradients",
          "[tools][train][stale]") {
  const SmallRun small;
  const std::string dp            = "--json --set layout.dp=2";
  const auto synchronous          = steps_of(small.run("train", dp).out);
  const auto no_delay             = steps_of(small.run("train", dp + stale(0)).out);
  const sg::testing::Outcome late = small.run("train", dp + stale(2));
  CAPTURE(late.err);
  REQUIRE(late.exit_code == 0);
  const auto steps = steps_of(late.out);
  REQUIRE(synchronous.size() == 12);
  REQUIRE(steps.size() == 12);
  CHECK(no_delay == synchronous);
  for (std::size_t i = 0; i < 12; ++i) CHECK(steps[i].starts_with(sg::str(i, " ")));
  CHECK(steps[0] == synchronous[0]);  // the same weights and tokens
  CHECK(steps[1] != synchronous[1]);
  CHECK(steps == steps_of(small.run("train", dp + stale(2)).out));
}

TEST_CASE("lines of stale steps stay in order with those of eval and checkpoints", "[tools][train][stale]") {
  const SmallRun small;
  const std::string options = "--json --set layout.dp=2" + stale(1);
  const auto plain          = steps_of(small.run("train", options).out);
  const auto outcome =
      small.run("train", options + " --set eval.every=4 --set eval.data.text=" + small.path("text.txt") +
                             " --set checkpoint.every=3 --set checkpoint.folder=" + small.path("saved"));
  CAPTURE(outcome.err, outcome.out);
  REQUIRE(outcome.exit_code == 0);
  CHECK(steps_of(outcome.out) == plain);
  std::int64_t steps = 0, others = 0;
  for (const auto& line : json_lines(outcome.out)) {
    if (line.at("type") == "step") ++steps;
    if (line.at("type") == "eval") {
      CHECK(line.at("step") == steps);
      ++others;
    }
    if (line.at("type") == "checkpoint") {
      CHECK(line.at("step").as_integer() <= steps);
      ++others;
    }
  }
  CHECK(others >= 6);
}

TEST_CASE("a stale run that is resumed prints the steps of one that never stopped", "[tools][resume][stale]") {
  const SmallRun small;
  const std::string options = "--json --set layout.dp=2" + stale(2);
  const auto whole          = steps_of(small.run("train", options).out);
  const std::string saving  = options + " --set checkpoint.folder=" + small.path("saved");
  auto steps                = steps_of(small.run("train", saving + " --steps 5").out);
  const auto resumed        = small.run("train", saving + " --resume");
  CAPTURE(resumed.err);
  REQUIRE(resumed.exit_code == 0);
  for (const std::string& step : steps_of(resumed.out)) steps.push_back(step);
  CHECK(steps == whole);
  // Another delay is refused. A synchronous run drops the gradients that wait, and says so.
  const std::string folder = " --set checkpoint.folder=" + small.path("saved") + " --steps 14 --resume";
  const auto refused       = small.run("train", "--json --set layout.dp=2" + stale(1) + folder);
  CHECK(refused.exit_code == 2);
  CHECK_THAT(refused.err, ContainsSubstring("with update.max_staleness 2, not 1"));
  const auto dropped = small.run("train", "--json --set layout.dp=1 --set 'data={\"synthetic\": 1}'" + folder);
  CAPTURE(dropped.err);
  CHECK(dropped.exit_code == 0);
  CHECK_THAT(dropped.err, ContainsSubstring("2 sets of gradients that wait for their update are dropped"));
}

TEST_CASE("stale runs with loss scaling say which steps overflowed", "[tools][train][stale]") {
  const SmallRun small;
  const std::string scale = GENERATE("dynamic", "1e12");  // gradients overflow with the second
  const auto outcome      = small.run(
           "train", "--json --set layout.dp=2 --set precision.param=fp16 --set precision.loss_scale=" + scale + stale(1));
  CAPTURE(scale, outcome.err);
  REQUIRE(outcome.exit_code == 0);
  int steps = 0;
  for (const auto& line : json_lines(outcome.out)) {
    if (line.at("type") != "step") continue;
    ++steps;
    CHECK((line.at("skipped") == true) == (scale == "1e12"));
    CHECK(line.at("grad_norm").is_number() == (scale == "dynamic"));
  }
  CHECK(steps == 12);
}

TEST_CASE("all commands take stale updates", "[tools][stale]") {
  const SmallRun small;
  const std::string options = "--set layout.dp=2" + stale(2);
  sg::save_calibration({.threads = 1, .ops = {{"linear", {{1e6, 1e4, 1e-3, 1e-3}}}}}, small.path("machine.json"));
  for (const std::string_view command : {"verify", "graph", "plan-memory", "simulate", "eval"}) {
    CAPTURE(command);
    const std::string machine = command == "simulate" ? " --machine " + small.path("machine.json") : "";
    const auto outcome        = small.run(std::string(command), options + machine);
    CAPTURE(outcome.err);
    CHECK(outcome.exit_code == 0);
  }
  const auto dump = small.run("train", options + " --dump-grads " + small.path("grads.safetensors"));
  CHECK(dump.exit_code == 2);
  CHECK_THAT(dump.err, ContainsSubstring("update.mode: stale with max_staleness 2 keeps no gradients"));
}

TEST_CASE("stale steps over Gloo have the lines of loopback", "[tools][stale][jobs]") {
  sg::testing::require_backend("gloo");
  const SmallRun small;
  const std::string options = "--json --set layout.dp=2" + stale(1);
  const auto alone          = steps_of(small.run("train", options).out);
  const auto outcome        = sg::testing::run_over("gloo", 2, "train " + small.config() + " " + options);
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK(steps_of(outcome.out) == alone);
}
