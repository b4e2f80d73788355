// Benchmarks of devices, without a device: on loopback, or refused.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "tests/support/processes/command_run.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::json_lines;
using sg::testing::run_stepgraph;

TEST_CASE("bench capture on loopback prints step times, and null for the figures of a device", "[tools][bench]") {
  const auto outcome = run_stepgraph("bench capture --backend loopback --model tiny --layout 2x1x1 --dry-run --json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  const auto lines = json_lines(outcome.out);
  REQUIRE(lines.size() == 1);
  const auto& line = lines.front();
  CHECK(line.at("type") == "capture");
  CHECK(line.at("model") == "tiny");
  CHECK(line.at("layout") == "2x1x1");
  CHECK(line.at("backend") == "loopback");
  CHECK(line.at("capture") == false);
  CHECK(line.at("steps") == 1);
  for (const char* field : {"step_ms", "step_p95_ms", "tokens_per_s"}) CHECK(line.at(field).as_real() > 0);
  for (const char* field : {"issue_ms", "issue_p95_ms", "traced_steps", "traced_step_ms", "activities_per_step",
                            "busy_ms", "idle_share", "idle_estimate", "longest_gap_us"})
    CHECK(line.at(field).is_null());
  CHECK(line.at("why_not_traced") == "no device");
  CHECK_THAT(run_stepgraph("bench capture --backend loopback --model tiny --dry-run").out,
             ContainsSubstring("tiny 1x1x1, node by node: a step ") && ContainsSubstring(": no device"));
}

TEST_CASE("bench copy checks its copies, prints a line for each case, and a trace of the last", "[tools][bench]") {
  const sg::testing::TempFolder folder;
  const std::string trace = (folder / "trace.json").string();
  const auto outcome =
      run_stepgraph("bench copy --backend loopback --threads 2 --bytes 100001 --dry-run --json --trace " + trace);
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  const auto lines = json_lines(outcome.out);
  REQUIRE(lines.size() == 5);
  const auto check_fields = [](const sg::JsonValue& line, const char* name, const std::vector<std::string>& there) {
    CAPTURE(line);
    CHECK(line.at("type") == "copy");
    CHECK(line.at("case") == name);
    CHECK(line.at("backend") == "loopback");
    CHECK(line.at("bytes") == 65536);
    for (const char* field : {"h2d_GBps", "d2h_GBps", "h2d_ratio_to_alone", "d2h_ratio_to_alone", "product_ms",
                              "gflops", "compute_slowdown", "three_at_once_share"}) {
      CAPTURE(field);
      const bool wanted = std::find(there.begin(), there.end(), field) != there.end();
      CHECK(line.at(field).is_number() == wanted);
      CHECK(line.at(field).is_null() != wanted);
    }
  };
  check_fields(lines[0], "h2d", {"h2d_GBps"});
  check_fields(lines[1], "d2h", {"d2h_GBps"});
  check_fields(lines[2], "both", {"h2d_GBps", "d2h_GBps", "h2d_ratio_to_alone", "d2h_ratio_to_alone"});
  check_fields(lines[3], "compute", {"product_ms", "gflops"});
  check_fields(lines[4], "all",
               {"h2d_GBps", "d2h_GBps", "h2d_ratio_to_alone", "d2h_ratio_to_alone", "product_ms", "gflops",
                "compute_slowdown", "three_at_once_share"});
  const std::string written = sg::testing::file_bytes(trace);
  for (const char* name : {"h2d 1", "d2h 1", "linear"}) CHECK_THAT(written, ContainsSubstring(name));
  CHECK_THAT(run_stepgraph("bench copy --backend loopback --dry-run").out,
             ContainsSubstring("h2d GB/s") && ContainsSubstring("all three lanes are busy for "));
}

TEST_CASE("benchmarks of devices refuse unknown values", "[tools][bench][refuses]") {
  for (const auto& [arguments, why] : sg::testing::some_of(std::vector<std::pair<std::string, std::string>>{
           {"bench capture --backend metal", "metal"},
           {"bench capture --model 124", "124"},
           {"bench capture --layout 2", "layout '2': is not DPxTPxPP"},
           {"bench capture --steps 0", "--steps"},
           {"bench copy --backend metal", "metal"},
           {"bench copy --bytes 0", "--bytes"},
           {"bench copy --width 7", "--width"},
           {"bench copy --copies 0", "--copies"},
           {"bench copy --backend loopback --dry-run --trace /nowhere/x.json", "there is no folder /nowhere"},
       })) {
    CAPTURE(arguments);
    const auto outcome = run_stepgraph(arguments);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring("stepgraph bench") && ContainsSubstring(why));
  }
}
