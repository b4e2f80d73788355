// Benchmarks of what devices do, where there is none: on loopback, or refused.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "tests/support/command_run.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::json_lines;
using sg::testing::run_stepgraph;

TEST_CASE("bench capture prints a line for each model and layout, without what only a device has", "[tools][bench]") {
  const auto outcome =
      run_stepgraph("bench capture --backend loopback --models tiny --layouts 1x1x1,2x1x1 --dry-run --json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  const auto lines = json_lines(outcome.out);
  REQUIRE(lines.size() == 2);
  for (const auto& line : lines) {
    CHECK(line.at("type") == "capture");
    CHECK(line.at("model") == "tiny");
    CHECK(line.at("backend") == "loopback");
    CHECK(line.at("capture") == false);
    CHECK(line.at("steps") == 1);
    for (const char* field : {"step_ms", "step_p95_ms", "tokens_per_s"}) CHECK(line.at(field).get<double>() > 0);
    for (const char* field : {"issue_ms", "issue_p95_ms", "traced_steps", "traced_step_ms", "activities_per_step",
                              "busy_ms", "idle_share", "idle_estimate", "longest_gap_us"})
      CHECK(line.at(field).is_null());
    CHECK(line.at("why_not_traced") == "no device");
  }
  CHECK(lines[1].at("layout") == "2x1x1");
  CHECK_THAT(run_stepgraph("bench capture --backend loopback --models tiny --dry-run").out,
             ContainsSubstring("tiny 1x1x1, node by node: a step ") && ContainsSubstring(": no device"));
}

TEST_CASE("benchmarks of devices refuse what they do not know", "[tools][bench][refuses]") {
  for (const auto& [arguments, why] : sg::testing::some_of(std::vector<std::pair<std::string, std::string>>{
           {"bench capture --backend metal", "metal"},
           {"bench capture --models 124", "124"},
           {"bench capture --layouts 2", "layout '2': is no DPxTPxPP"},
           {"bench capture --steps 0", "--steps"},
       })) {
    CAPTURE(arguments);
    const auto outcome = run_stepgraph(arguments);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring("stepgraph bench") && ContainsSubstring(why));
  }
}
