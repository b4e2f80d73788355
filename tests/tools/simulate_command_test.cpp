// simulate, and the benchmarks of training.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <filesystem>

#include "engine/base/error.hpp"
#include "graphs/predict/calibration.hpp"
#include "tests/support/command_run.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::json_lines;
using sg::testing::SmallRun;

namespace {

// A machine on which products take a millisecond for each megaflop, and everything else almost no time.
std::string put_machine(const SmallRun& small, int threads = 1, const std::string& host = sg::host_name()) {
  const std::string path = small.path("machine.json");
  sg::Calibration machine{.host = host, .cores = 4, .threads = threads};
  for (const char* op :
       {"linear", "linear_gelu", "linear_input_gradient", "linear_input_gradient_gelu", "linear_weight_gradient"})
    machine.ops[op] = {{1e6, 1e4, 1e-3, 1e-3}};
  machine.ops["adamw"] = {{1e6, 1e6, 1e-9, 1e-9}};
  sg::save_calibration(machine, path);
  return path;
}

}  // namespace

TEST_CASE("simulate predicts the time of a step on a measured machine", "[tools][simulate]") {
  const SmallRun small;
  const std::string machine = "--machine " + put_machine(small);
  const auto outcome        = small.run("simulate", machine + " --json --trace " + small.path("trace.json"));
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK_THAT(outcome.err, ContainsSubstring("not measured, simulated at average rates: "));
  const auto lines = json_lines(outcome.out);
  REQUIRE(lines.size() > 5);
  CHECK(lines[0].at("type") == "plan");
  CHECK(lines[1].at("type") == "simulate");
  const double step_s = lines[1].at("step_s").as_real();
  double flops = 0, seconds = 0;
  for (std::size_t i = 2; i < lines.size(); ++i) {
    CHECK(lines[i].at("type") == "op");
    if (lines[i].at("op").as_string().find("linear") != 0) continue;
    flops += lines[i].at("flops").as_real();
    seconds += lines[i].at("seconds").as_real();
  }
  CHECK(flops > 1e6);
  CHECK(std::abs(seconds - flops * 1e-9) < 1e-9 * flops * 1e-6);
  CHECK(step_s >= seconds);
  CHECK(std::abs(lines[1].at("tokens_per_s").as_real() * step_s - 32) < 1e-6);
  CHECK(lines[1].at("layout") == "pp1-dp1-tp1");
  CHECK(lines[1].at("ranks") == 1);
  CHECK(lines[1].at("threads") == 1);
  CHECK(lines[1].at("bubble") == 0);
  CHECK(lines[1].at("peak_bytes") == lines[0].at("peak_bytes")[0]);
  CHECK(sg::parse_json(sg::testing::file_bytes(small.path("trace.json"))).at("traceEvents").size() > 100);

  const auto piped = json_lines(small.run("simulate", machine + " --json --set layout.pp=2").out).at(1);
  CHECK(piped.at("ranks") == 2);
  CHECK(piped.at("bubble").as_real() > 0.05);
  CHECK_THAT(small.run("simulate", machine).out, ContainsSubstring("simulated step: ") &&
                                                     ContainsSubstring(" tokens/s on 1 of 4 cores of ") &&
                                                     ContainsSubstring("linear_weight_gradient"));
  CHECK_THAT(small.run("simulate", "--machine " + put_machine(small, 1, "elsewhere")).err,
             ContainsSubstring("uses measurements of another machine, 'elsewhere'"));
}

TEST_CASE("the calibration of another machine is not overwritten", "[tools][simulate][refuses]") {
  const SmallRun small;
  const std::string theirs = put_machine(small, 1, "elsewhere"), before = sg::testing::file_bytes(theirs);
  const auto outcome = small.run("simulate", "--calibrate --machine " + theirs);
  CHECK(outcome.exit_code == 2);
  CHECK_THAT(outcome.err, ContainsSubstring("machine.json' was measured on 'elsewhere', but this is '"));
  CHECK(sg::testing::file_bytes(theirs) == before);
}

TEST_CASE("simulate refuses a calibration that does not fit, and says what to do", "[tools][simulate][refuses]") {
  const SmallRun small;
  sg::testing::TempFolder folder;
  const std::string broken = folder.put("broken.json", "{\"type\": \"machine\"}").string();
  for (const auto& [more, why] : sg::testing::some_of(std::vector<std::pair<std::string, std::string>>{
           {"--machine " + broken,
            "broken.json: has no \"version\" (a file that `stepgraph simulate --calibrate` wrote)"},
           {"--machine " + small.config(), "run.json: does not describe a machine (a file that"},
           {"--machine " + small.path("none.json"), "none.json"},
           {"--machine " + put_machine(small, 3),
            "was measured with 3 threads, but the run has 1 (--threads 3, or --calibrate"},
           {"--machine " + small.path("machine.json") + " --threads 3 --trace -",
            "--trace -: stdout is for the results"},
       })) {
    CAPTURE(more);
    const auto outcome = small.run("simulate", more);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring("stepgraph simulate: ") && ContainsSubstring(why));
  }
  // A calibration in the cache that another machine wrote is refused.
  const auto path   = sg::calibration_path(1);
  const auto cached = folder / "stepgraph" / path.filename().string();
  sg::save_calibration({.host = "elsewhere", .cores = 4, .threads = 1, .ops = {{"linear", {{1, 1, 1, 1}}}}}, cached);
  const auto outcome = sg::testing::run_command(sg::str("XDG_CACHE_HOME=", folder.path().string(), " ",
                                                        sg::testing::command_path(), " simulate ", small.config()));
  CHECK(outcome.exit_code == 2);
  CHECK_THAT(outcome.err, ContainsSubstring(cached.string() + ": was measured on 'elsewhere'") &&
                              ContainsSubstring("(--calibrate to measure again"));
}

TEST_CASE("bench train prints the promised fields and nothing else", "[tools][bench]") {
  const auto outcome = sg::testing::run_stepgraph(
      "bench train --models tiny --layouts 1x1x1,2x1x1,1x2x1,1x1x2 --threads 2 --dry-run --json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  std::vector<std::string> layouts;
  std::size_t kernels = 0;
  double share        = 0;
  for (const auto& line : json_lines(outcome.out)) {
    if (line.at("type") == "kernel") {
      ++kernels;
      share += line.at("share").as_real();
      for (const char* field : {"nodes", "ms", "share", "gflops", "GBps"}) CHECK(line.at(field).is_number());
      CHECK(line.at("op").is_string());
      continue;
    }
    CHECK(line.at("type") == "train");
    CHECK(line.at("model") == "tiny");
    CHECK(line.at("backend") == "loopback");
    CHECK(line.at("shard") == "none");
    layouts.push_back(line.at("layout").as_string());
    // 6 (12 L d^2 + V d) + 12 L T d
    CHECK(line.at("flops_per_token") == 6 * (12 * 2 * 16 * 16 + 64 * 16) + 12 * 2 * 8 * 16);
    for (const char* field : {"tokens_per_s", "step_s", "peak_gflops", "share_of_peak", "peak_bytes", "ratio_to_1x1x1"})
      CHECK(line.at(field).as_real() > 0);
    CHECK(line.at("lower_bound_bytes").as_integer() <= line.at("peak_bytes").as_integer());
    for (const char* field : {"resident_bytes", "process_bytes", "cpu_share"}) CHECK(line.at(field).is_number());
    const bool in_pieces = layouts.back() == "1x2x1" || layouts.back() == "1x1x2";
    CHECK(line.at("global_batch") == (in_pieces ? 32 : 4));
    CHECK(line.at("micro_batch") == (layouts.back() == "2x1x1" ? 2 : 4));
  }
  CHECK(layouts == std::vector<std::string>{"1x1x1", "2x1x1", "1x2x1", "1x1x2"});
  CHECK(kernels > 40);
  CHECK(std::abs(share - 4) < 1e-6);
  for (const auto& [arguments, why] :
       {std::pair{"--models XXL", "XXL"}, std::pair{"--models tiny --layouts 2x2", "2x2"},
        std::pair{"--models tiny --layouts 3x1x1", "over 3 data-parallel ranks"}}) {
    const auto refused = sg::testing::run_stepgraph(sg::str("bench train ", arguments));
    CHECK(refused.exit_code == 2);
    CHECK_THAT(refused.err, ContainsSubstring(why));
  }
}

TEST_CASE("bench predict has a predicted and a measured time for each layout", "[tools][bench]") {
  const auto outcome =
      sg::testing::run_stepgraph("bench predict --models tiny --layouts 1x1x1,2x2x2 --threads 2 --dry-run --json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const auto lines = json_lines(outcome.out);
  REQUIRE(lines.size() == 2);
  for (const auto& line : lines) {
    CHECK(line.at("type") == "predict");
    for (const char* field : {"predicted_s", "measured_s", "ratio"}) CHECK(line.at(field).as_real() > 0);
  }
}
