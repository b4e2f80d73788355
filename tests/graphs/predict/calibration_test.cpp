#include "graphs/predict/calibration.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstdlib>
#include <utility>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using Catch::Matchers::MessageMatches;
using Catch::Matchers::StartsWith;

namespace {

sg::Calibration some_calibration() {
  return {.host            = "a \"host\"",
          .cores           = 8,
          .threads         = 2,
          .node_overhead_s = 1.25e-7,
          .ops = {{"linear", {{1e9, 1e6, 0.1, 1.0 / 30}, {1e6, 1e4, 2e-4, 1e-4}}}, {"copy", {{0, 1e6, 1e-3, 1e-3}}}}};
}

}  // namespace

TEST_CASE("a calibration is unchanged after writing and reading", "[graphs][calibration]") {
  const sg::testing::TempFolder folder;
  const sg::Calibration before = some_calibration();
  CHECK(sg::parse_calibration(sg::to_json(before)) == before);
  sg::save_calibration(before, folder / "new/folders/machine.json");
  CHECK(sg::load_calibration(folder / "new/folders/machine.json") == before);
}

TEST_CASE("a file without a calibration is refused by name, with advice", "[graphs][calibration][refuses]") {
  const sg::testing::TempFolder folder;
  const std::string good = sg::to_json(some_calibration());
  const auto changed     = [&](std::string_view from, std::string_view to) {
    std::string text     = good;
    const std::size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    return text.replace(at, from.size(), to);
  };
  for (const auto& [text, why] : std::vector<std::pair<std::string, std::string>>{
           {"", "line 1"},
           {"{\"type\": ", "line 1"},
           {good.substr(0, good.size() / 2), "line "},
           {"[1, 2]", "does not describe a machine"},
           {"{\"model\": {}}", "does not describe a machine"},
           {changed("\"machine\"", "\"plan\""), "does not describe a machine"},
           {changed("\"version\": 1", "\"version\": 2"), "version: is 2, not 1"},
           {changed("\"cores\": 8", "\"cores\": 0"), "cores: is 0, not 1 to 65536"},
           {changed("\"threads\": 2", "\"threads\": 2.5"), "threads: is 2.5, not 1 to 65536"},
           {changed("\"threads\"", "\"thread\""), "has no \"threads\""},
           {changed("1.25e-07", "-1"), "node_overhead_s: is not a time"},
           {changed("0.1", "0"), "ops.linear: rate table: "},
           {changed("0.1", "\"0.1\""), "ops.linear: is \"0.1\", not a number"},
           {changed("1000000000.0,", ""), "not [flops, bytes, busy_s, alone_s]"},
           {changed("[[0.0,1000000.0,0.001,0.001]]", "[]"), "ops.copy: is not a list of points"}}) {
    CAPTURE(text);
    const auto path = folder.put("machine.json", text);
    CHECK_THROWS_MATCHES(sg::load_calibration(path), sg::Error,
                         MessageMatches(StartsWith(path.string() + ": ") && ContainsSubstring(why) &&
                                        EndsWith("(a file that `stepgraph simulate --calibrate` wrote)")));
  }
  CHECK_THROWS_MATCHES(sg::load_calibration(folder / "none.json"), sg::Error,
                       MessageMatches(ContainsSubstring("none.json")));
}

TEST_CASE("a calibrated machine has the measured pool, overhead and tables", "[graphs][calibration]") {
  const sg::Machine machine = sg::calibrated_machine(some_calibration(), 4);
  CHECK(machine.num_ranks() == 4);
  REQUIRE(machine.pools().size() == 1);
  CHECK(machine.pools()[0].workers == 2);
  REQUIRE(machine.table_of("linear") != nullptr);
  CHECK(machine.table_of("linear")->at(1e6, 1e4).alone_s == 1e-4);
  CHECK(machine.table_of("other") == nullptr);
  // An op that was not measured gets the highest measured flops per second and the median bandwidth of streaming ops.
  const sg::Rate& other = machine.rate_of(sg::NodeKind::compute, "other");
  CHECK(other.flops_per_s == 1e10);
  CHECK(other.bytes_per_s == 1e9);
  CHECK(other.overhead_s == 1.25e-7);
}

TEST_CASE("calibration trains small models and measures every op that they use", "[graphs][calibration]") {
  const int threads           = 2;
  const sg::Calibration found = sg::calibrate([](int ranks) { return std::make_unique<sg::LoopbackWorld>(ranks); },
                                              {.threads = threads, .steps = 1, .small = true});
  CHECK(found.host == sg::host_name());
  CHECK(found.cores == sg::num_cores());
  CHECK(found.threads == threads);
  for (const char* op : {"linear", "linear_input_gradient", "linear_weight_gradient", "attention", "all_reduce",
                         "all_gather", "reduce_scatter", "adamw", "send"}) {
    CAPTURE(op);
    REQUIRE(found.ops.contains(op));
  }
  CHECK(found.ops.at("linear").size() >= 4);  // one point per size
  CHECK(sg::parse_calibration(sg::to_json(found)) == found);
  CHECK_THROWS_MATCHES(sg::calibrate({}, {.threads = -1}), sg::Error, MessageMatches(ContainsSubstring("-1 threads")));
}
