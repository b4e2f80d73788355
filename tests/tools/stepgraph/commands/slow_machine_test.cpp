#include <catch2/catch_test_macros.hpp>

#include "graphs/predict/calibration.hpp"
#include "tests/support/processes/command_run.hpp"

namespace sg = stepgraph;

TEST_CASE("a machine on which an op is far slower alone than beside others can be simulated", "[tools][simulate]") {
  const sg::testing::SmallRun small;
  sg::Calibration machine{.host = sg::host_name(), .cores = 4, .threads = 2};
  machine.ops["linear"] = {{1e6, 1e4, 1e-3, 1e20}};
  sg::save_calibration(machine, small.path("machine.json"));
  const auto found = small.run("simulate", "--json --threads 2 --machine " + small.path("machine.json"));
  CAPTURE(found.err);
  REQUIRE(found.exit_code == 0);
  CHECK(found.out.find("step_s") != std::string::npos);
}
