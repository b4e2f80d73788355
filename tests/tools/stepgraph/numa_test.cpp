// STEPGRAPH_NUMA: training has the same bits with and without NUMA nodes, and wrong text is refused.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/run/threads/numa_nodes.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::str;
using sg::testing::Outcome;

namespace {

Outcome run_with(const std::string& numa, const std::string& arguments) {
  return sg::testing::run_bash(str("STEPGRAPH_NUMA='", numa, "' ", sg::testing::command_path(), " ", arguments));
}

}  // namespace

TEST_CASE("training has the same bits with and without NUMA nodes", "[tools][numa]") {
  const std::vector<int> allowed = sg::allowed_processors();
  if (allowed.size() < 2) SKIP("needs 2 processors, and this process may use " << allowed.size());
  const std::string layout = GENERATE("1x1x1", "2x1x1", "1x2x2");
  CAPTURE(layout);
  static int seen = 0;
  if (sg::testing::left_out(seen, 2)) return;
  const sg::testing::TempFolder files;
  // Large enough that its products are cut and that its memory is placed.
  const std::string config = files.put("run.json", R"({
    "model": {"kind": "gpt2", "layers": 2, "width": 160, "heads": 4, "context": 96, "vocab": 500},
    "data": {"synthetic": 3}, "batch": {"global": 4, "micro": 2, "seq": 96}})");
  const std::string run =
      str("train ", config, " --steps ", sg::testing::cases(3), " --json --set layout.dp=", layout[0],
          " --set layout.tp=", layout[2], " --set layout.pp=", layout[4]);
  const std::string two = str(allowed[0], "/", allowed[1]), one = str(allowed[1]);
  std::string first;
  for (const auto& [numa, threads] :
       std::vector<std::pair<std::string, int>>{{"off", 2}, {two, 2}, {two, 5}, {one, 2}, {"auto", 2}}) {
    if (sg::testing::sanitized() && numa != "off" && threads != 5) continue;
    const Outcome found = run_with(numa, str(run, " --threads ", threads));
    CAPTURE(numa, threads, found.err);
    REQUIRE(found.exit_code == 0);
    std::string steps;
    for (const sg::JsonValue& line : sg::testing::json_lines(found.out)) {
      if (line.at("type") == "step") steps += str(line.at("loss"), " ", line.at("grad_norm"), "\n");
    }
    if (first.empty()) first = steps;
    CHECK(steps == first);
    CHECK_FALSE(steps.empty());
  }
}

TEST_CASE("commands refuse a wrong STEPGRAPH_NUMA by name, whether or not they run a graph", "[tools][numa]") {
  const sg::testing::SmallRun small;
  for (const std::string& command : {str("train ", small.config()), str("verify ", small.config()),
                                     std::string("schedule --kind 1f1b --stages 2 --microbatches 2")}) {
    CAPTURE(command);
    const Outcome wrong = run_with("nodes", command);
    CHECK(wrong.exit_code == 2);
    CHECK(wrong.out.empty());
    CHECK_THAT(wrong.err, ContainsSubstring("STEPGRAPH_NUMA: 'nodes' is not off, auto or lists of processors"));
  }
  const int absent    = sg::allowed_processors().back() + 1;
  const Outcome other = run_with(str(absent), str("verify ", small.config()));
  CHECK(other.exit_code == 2);
  CHECK_THAT(other.err,
             ContainsSubstring(str("has processor ", absent, ", which this process may not use (it may use ")));
  CHECK(run_with("nodes", "train --help").exit_code == 0);
}
