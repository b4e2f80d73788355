#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "backends/init_world.hpp"
#include "backends/process/flight.hpp"
#include "tests/support/processes/command_run.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::run_stepgraph;
using sg::testing::TempFolder;

TEST_CASE("flight says which rank waits for which, and which are missing", "[tools][flight]") {
  const TempFolder folder;
  const std::string path = (folder / "flight").string();
  for (const int rank : {0, 2}) {
    sg::Flight flight{.rank = rank, .size = 3, .line = "rank 1 is gone"};
    flight.progress = {.phase = sg::Phase::run, .run = 7, .nodes_done = 5, .waits = {{1, "all_reduce g0"}}};
    sg::write_flight(path, flight);
  }
  const auto text = run_stepgraph("flight " + path);
  CHECK(text.exit_code == 0);
  CHECK_THAT(text.out, ContainsSubstring("rank 1 is gone"));
  CHECK_THAT(text.out, ContainsSubstring("all_reduce g0"));
  const auto json = sg::testing::json_lines(run_stepgraph("flight --json " + path).out);
  REQUIRE(json.size() == 1);
  CHECK(json[0].at("missing") == sg::JsonValue::list({1}));
  CHECK(json[0].at("awaited") == sg::JsonValue::list({1}));
  CHECK(json[0].at("ranks").items.size() == 2);
}

TEST_CASE("flight refuses a folder without reports", "[tools][flight]") {
  const TempFolder folder;
  CHECK(run_stepgraph("flight " + (folder / "nothing").string()).exit_code == 2);
}
