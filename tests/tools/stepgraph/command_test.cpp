#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <sstream>

#include "graphs/predict/calibration.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/sanitizer.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::run_stepgraph;

TEST_CASE("--help and --version work and exit with 0", "[tools][command]") {
  for (const char* path :
       {"", "bench ", "bench overhead ", "bench collectives ", "bench adam ", "bench crew ", "bench train ",
        "bench predict ", "bench pipeline ", "bench capture ", "bench copy ", "plan-memory ", "schedule ", "simulate ",
        "train ", "eval ", "generate ", "graph ", "verify "}) {
    CAPTURE(path);
    const auto help = run_stepgraph(std::string(path) + "--help");
    CHECK(help.exit_code == 0);
    CHECK_THAT(help.out, ContainsSubstring("Example: stepgraph"));
  }
  CHECK_THAT(run_stepgraph("--help").out, ContainsSubstring("130 SIGINT (Ctrl-C), 143 SIGTERM, 129 SIGHUP"));
  CHECK_THAT(run_stepgraph("train --help").out,
             ContainsSubstring("130, 143, 129 or 138") && ContainsSubstring("--force"));
  const auto version = run_stepgraph("--version");
  CHECK(version.exit_code == 0);
  CHECK_THAT(version.out, ContainsSubstring("stepgraph 0.") && ContainsSubstring("CUDA") &&
                              ContainsSubstring("gloo: ") && ContainsSubstring("mpi: "));
}

TEST_CASE("bad usage exits with 2 and says what is wrong", "[tools][command][refuses]") {
  for (const auto& [arguments, why] :
       {std::pair{"", "subcommand is required"},
        std::pair{"brench", "brench"},
        std::pair{"bench overheat", "overheat"},
        std::pair{"bench overhead --threads 2,0", "--threads"},
        std::pair{"bench overhead --nodes many", "--nodes"},
        std::pair{"bench overhead --fast", "--fast"},
        std::pair{"bench collectives --ranks 1", "--ranks"},
        std::pair{"bench collectives --ops all_reduse", "all_reduse"},
        std::pair{"bench collectives --algorithms magic", "magic"},
        std::pair{"bench collectives --sizes 0", "--sizes"},
        std::pair{"bench adam --elements 0", "--elements"},
        std::pair{"train run.json --backend cuda",
                  "unknown option '--backend' (a key of the config is changed with --set"},
        std::pair{"brench --fast", "unknown subcommand 'brench' (did you mean bench? known: "},
        std::pair{"trian run.json", "unknown subcommand 'trian' (did you mean train? known: "},
        std::pair{"bench colectives", "unknown subcommand 'colectives' (did you mean collectives? known: "},
        std::pair{"train run.json --stesp 5", "unknown option '--stesp' (did you mean --steps?)"},
        std::pair{"train run.json --stesp=5", "unknown option '--stesp' (did you mean --steps?)"},
        std::pair{"train --sav model", "unknown option '--sav' (did you mean --save?)"},
        std::pair{"schedule --stagse 4", "unknown option '--stagse' (did you mean --stages?)"},
        std::pair{"bench copy --bytes 24G", "'24G' is not a size"},
        std::pair{"bench copy --bytes 1TiB", "--bytes"},
        std::pair{"bench collectives --sizes 4KiB,x", "'x' is not a size"},
        std::pair{"bench adam now", "unexpected argument 'now'"}}) {
    CAPTURE(arguments);
    const auto outcome = run_stepgraph(arguments);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, ContainsSubstring("stepgraph") && ContainsSubstring(why) && ContainsSubstring("--help"));
  }
}

TEST_CASE("sizes can be given with units", "[tools][command]") {
  const auto outcome =
      run_stepgraph("bench collectives --json --ranks 2 --ops all_reduce --runs 1 --sizes 4KiB,1kB,64");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  std::vector<std::int64_t> sizes;
  for (const auto& line : sg::testing::json_lines(outcome.out)) sizes.push_back(line.at("bytes").as_integer());
  CHECK(sizes == std::vector<std::int64_t>{4096, 1000, 64});
}

TEST_CASE("more threads than cores are warned about", "[tools][command]") {
  const sg::testing::SmallRun small;
  const std::string cores = std::to_string(sg::num_cores()), more = std::to_string(sg::num_cores() + 1);
  CHECK(small.run("train", "--steps 1 --json --threads " + cores).err.empty());
  for (const char* command : {"train", "eval"}) {
    const auto outcome = small.run(command, "--steps 1 --json --threads " + more);
    CHECK(outcome.exit_code == 0);
    CHECK_THAT(outcome.err, ContainsSubstring("stepgraph: " + more + " threads are more than the " + cores + " core") &&
                                ContainsSubstring("(" + cores + " uses all of them)"));
  }
  const auto copy = run_stepgraph("bench copy --backend loopback --dry-run --json --threads " + more);
  CHECK(copy.exit_code == 0);
  CHECK_THAT(copy.err, ContainsSubstring("stepgraph: " + more + " threads are more than the "));
}

TEST_CASE("bench overhead prints JSON lines with the promised fields and nothing else", "[tools][bench]") {
  if (sg::testing::sanitizer() == sg::testing::Sanitizer::thread)
    SKIP("plain Taskflow, the baseline, is not annotated for ThreadSanitizer");
  const auto outcome = run_stepgraph("bench overhead --threads 1,2 --dry-run --json");
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  int runs = 0, records = 0, builds = 0;
  std::istringstream lines(outcome.out);
  for (std::string line; std::getline(lines, line);) {
    const auto json = sg::parse_json(line);
    if (json.at("type") == "run") {
      CHECK(json.at("threads") == (runs < 4 ? 1 : 2));
      ++runs;
      for (const char* field : {"nodes", "ns_per_node", "raw_taskflow_ns_per_node", "ratio"})
        CHECK(json.at(field).is_number());
      CHECK(json.at("graph").is_string());
    } else if (json.at("type") == "record") {
      ++records;
      for (const char* field : {"nodes", "ns_per_node", "unrecorded_ns_per_node", "extra_ns_per_node"})
        CHECK(json.at(field).is_number());
    } else if (json.at("type") == "build") {
      ++builds;
      for (const char* field : {"nodes", "ns_per_node"}) CHECK(json.at(field).is_number());
    }
  }
  CHECK(runs == 8);
  CHECK(records == 8);
  CHECK(builds == 3);
}

TEST_CASE("bench crew checks that each tile runs once and prints the promised fields and nothing else",
          "[tools][bench]") {
  if (sg::testing::sanitizer() == sg::testing::Sanitizer::thread) SKIP("TBB is not annotated for ThreadSanitizer");
  const bool few     = sg::testing::sanitized();
  const auto outcome = run_stepgraph(few ? "bench crew --threads 2 --ranks 3 --dry-run --json"
                                         : "bench crew --threads 1,2 --ranks 1,3 --dry-run --json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const auto lines = sg::testing::json_lines(outcome.out);
  REQUIRE(lines.size() == (few ? 1U : 2 * 2U) * 4 + 1);
  for (std::size_t i = 0; i + 1 < lines.size(); ++i) {
    CHECK(lines[i].at("type") == "crew");
    for (const char* field : {"threads", "ranks", "us", "tbb_static_us", "tbb_affinity_us", "ratio_to_tbb"})
      CHECK(lines[i].at(field).is_number());
  }
  CHECK(lines.back().at("type") == "crew_summary");
  CHECK(lines.back().at("mean_ratio_to_tbb").is_number());
}

TEST_CASE("bench adam checks its answer and prints the promised fields and nothing else", "[tools][bench]") {
  const auto outcome = run_stepgraph("bench adam --elements 5000 --threads 2 --runs 2 --json");
  REQUIRE(outcome.exit_code == 0);
  const auto line = sg::parse_json(outcome.out);
  CHECK(line.at("type") == "adam");
  CHECK(line.at("elements") == 5000);
  CHECK(line.at("threads") == 2);
  CHECK(line.at("adam_GBps").as_real() > 0);
  CHECK(line.at("triad_GBps").as_real() > 0);
  CHECK(line.at("ratio").as_real() > 0);
}

TEST_CASE("bench adam can run beside copies in both directions, and checks both", "[tools][bench]") {
  const auto outcome = run_stepgraph("bench adam --copies --dry-run --threads 2 --json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  std::istringstream lines(outcome.out);
  std::string line;
  REQUIRE(std::getline(lines, line));
  CHECK(sg::parse_json(line).at("type") == "adam");
  REQUIRE(std::getline(lines, line));
  const auto json = sg::parse_json(line);
  CHECK(json.at("type") == "adam_beside_copies");
  CHECK(json.at("backend") == "loopback");
  CHECK(json.at("elements") == 100'000);
  for (const char* field : {"adam_GBps", "adam_alone_GBps", "parameters_per_s", "parameters_per_s_alone"}) {
    CAPTURE(field);
    CHECK(json.at(field).as_real() > 0);
  }
  for (const char* field : {"h2d_GBps", "d2h_GBps"}) CHECK(json.at(field).as_real() >= 0);
  CHECK_FALSE(std::getline(lines, line));
}

TEST_CASE("bench collectives checks every collective and prints the promised fields and nothing else",
          "[tools][bench]") {
  const auto outcome = run_stepgraph(
      "bench collectives --dry-run --json --ranks 2,3 --sizes 4096,65536 --ops "
      "all_reduce,reduce,all_gather,reduce_scatter,broadcast,scatter,gather,all_to_all,permute");
  CAPTURE(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  CHECK(outcome.err.empty());
  int collectives = 0;
  std::istringstream lines(outcome.out);
  for (std::string line; std::getline(lines, line); ++collectives) {
    const auto json = sg::parse_json(line);
    CHECK(json.at("type") == "collective");
    CHECK(json.at("algorithm") == "direct");
    CHECK(json.at("op").is_string());
    for (const char* field : {"ranks", "bytes", "algbw_GBps", "busbw_GBps", "memcpy_GBps"})
      CHECK(json.at(field).as_real() > 0);
  }
  CHECK(collectives == 9 * 2 * 2);
}
