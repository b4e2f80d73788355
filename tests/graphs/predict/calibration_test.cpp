#include "graphs/predict/calibration.hpp"

#include <algorithm>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstdlib>
#include <filesystem>
#include <tuple>
#include <utility>

#include "backends/loopback/world.hpp"
#include "backends/storage/spill_file.hpp"
#include "engine/base/error.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using Catch::Matchers::MessageMatches;
using Catch::Matchers::StartsWith;

namespace {

sg::Calibration some_calibration() {
  return {.host            = "a \"host\"",
          .disk            = "/a/\"folder\"",
          .cores           = 8,
          .threads         = 2,
          .node_overhead_s = 1.25e-7,
          .ops             = {{"linear",
                               {{1e9, 1e6, 0.1, 1.0 / 30},
                                {1e6, 1e4, 2e-4, 1e-4, 1.5e-4, 1.2e-4},
                                {1e4, 1e3, 2e-6, 1e-6, 1.5e-6},
                                {1e5, 2e3, 2e-5, 1e-5, 0, 1.2e-5}}},
                              {"copy", {{0, 1e6, 1e-3, 1e-3}}}}};
}

// A device that computes 1e15 flops in bf16 and 1e14 in fp32 in a second; copies and updates on the host share memory.
sg::Calibration some_device() {
  sg::Calibration found{.host            = "somewhere",
                        .device          = "NVIDIA H200",
                        .device_bytes    = 150'000'000'000,
                        .cores           = 16,
                        .threads         = 16,
                        .node_overhead_s = 0};
  const auto lane = [](double seconds) { return std::vector<sg::RatePoint>{{0, 2e9, seconds, seconds}}; };
  found.ops       = {{"linear", {{1e12, 1e9, 1e-2, 1e-2}}}, {"h2d", lane(1.0 / 50)}, {"d2h", lane(1.0 / 40)}};
  found.ops_bf16  = {{"linear", {{1e12, 1e9, 1e-3, 1e-3}}},
                     {"adamw", {{15e6, 30e6, 1e-5, 1e-5}}},
                     {"adamw@host", {{15e6, 30e6, 1e-3 / 4, 1e-3 / 4}}}};
  found.beside    = {{sg::LaneKind::host, {sg::LaneKind::h2d, sg::LaneKind::d2h}, 2},
                     {sg::LaneKind::host, {sg::LaneKind::h2d}, 1.5},
                     {sg::LaneKind::h2d, {sg::LaneKind::d2h, sg::LaneKind::host}, 1.25}};
  return found;
}

}  // namespace

TEST_CASE("a calibration is unchanged after writing and reading", "[graphs][calibration]") {
  const sg::testing::TempFolder folder;
  const sg::Calibration before = some_calibration();
  CHECK(sg::parse_calibration(sg::to_json(before)) == before);
  CHECK(sg::parse_calibration(sg::to_json(some_device())) == some_device());
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
           {changed("1000000000.0,", "1,1,1,1,"), "not [flops, bytes, busy_s, alone_s]"},
           {changed("1000000000.0,", "-1,1,"), "ops.linear: rate table: "},
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

TEST_CASE("the measurements of a device that are wrong are refused", "[graphs][calibration][refuses]") {
  const std::string good = sg::to_json(some_device());
  for (const auto& [from, to, why] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {"\"NVIDIA H200\"", "200", "device: is 200, not a name"},
           {"150000000000", "-1", "device_bytes: is -1, not a number of bytes"},
           {"[\"host\",[", "[\"hosts\",[", "beside: is \"hosts\", not a lane"},
           {"[\"h2d\",\"d2h\"],2.0", "[],2.0", "beside: machine: lane host beside 0 lanes"},
           {"1.25]", "0.25]", "slower by a factor of 0.25"},
           {"\"adamw\": [[15000000.0,", "\"adamw\": [[-1,", "ops_bf16.adamw: rate table: "}}) {
    CAPTURE(from, to);
    std::string text     = good;
    const std::size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    CHECK_THROWS_MATCHES(sg::parse_calibration(text.replace(at, from.size(), to)), sg::Error,
                         MessageMatches(ContainsSubstring(why)));
  }
}

TEST_CASE("a calibrated device computes in its precision, beside copies and the host", "[graphs][calibration]") {
  const sg::Calibration found = some_device();
  const sg::Machine bf16      = sg::calibrated_machine(found, 2, sg::DType::bf16);
  const sg::Machine f32       = sg::calibrated_machine(found, 2);
  const auto compute          = sg::NodeKind::compute;
  CHECK(bf16.table_of("linear", compute)->at(1e12, 1e9).alone_s == 1e-3);
  CHECK(sg::calibrated_machine(found, 2, sg::DType::f16).table_of("linear", compute)->at(1e12, 1e9).alone_s == 1e-3);
  CHECK(f32.table_of("linear", compute)->at(1e12, 1e9).alone_s == 1e-2);
  sg::Calibration processor = found;  // which has no instructions for fp16
  processor.device.clear();
  CHECK(sg::ops_of(processor, sg::DType::f16) == found.ops);
  CHECK(sg::ops_of(processor, sg::DType::bf16) != found.ops);
  CHECK(bf16.table_of("h2d", sg::NodeKind::copy)->at(0, 2e9).alone_s == 1.0 / 50);
  CHECK(bf16.table_of("adamw", compute)->at(15e6, 30e6).alone_s == 1e-5);
  CHECK(bf16.table_of("adamw", sg::NodeKind::host)->at(15e6, 30e6).alone_s == 1e-3 / 4);
  CHECK(bf16.table_of("linear", sg::NodeKind::host) == nullptr);
  // A device runs one node at a time, whatever it is for; copies have no worker.
  const auto pool = [&](int rank, std::optional<sg::LaneKind> lane) { return bf16.pool_of(sg::Rank{rank}, lane); };
  CHECK(pool(0, sg::LaneKind::compute) == pool(0, {}));
  CHECK(pool(0, sg::LaneKind::compute) != pool(1, sg::LaneKind::compute));
  for (const auto lane : {sg::LaneKind::h2d, sg::LaneKind::d2h, sg::LaneKind::host})
    CHECK(pool(0, lane) == sg::no_pool);
  CHECK(bf16.slowdown(sg::LaneKind::host, sg::Machine::bit(sg::LaneKind::h2d)) == 1.5);

  const sg::OffloadRates rates = sg::offload_rates(found);
  CHECK(rates.h2d_bytes_per_s == Catch::Approx(40e9));
  CHECK(rates.d2h_bytes_per_s == Catch::Approx(40e9));
  CHECK(rates.host_elements_per_s == Catch::Approx(2e9));
  CHECK(rates.device_elements_per_s == Catch::Approx(1e11));
  CHECK(sg::offload_rates(some_calibration()) == sg::usual_offload_rates);
}

// Loopback in place of a device: its copies, host nodes and steps are measured by the same code.
TEST_CASE("calibration of a device measures both precisions, copies and host updates", "[graphs][calibration]") {
  int lines                   = 0;
  const sg::Calibration found = sg::calibrate(
      [](int ranks) { return std::make_unique<sg::LoopbackWorld>(ranks); },
      {.threads = 2, .steps = 1, .small = true, .device = "a device", .tell = [&](const std::string&) { ++lines; }});
  CHECK(found.device == "a device");
  CHECK(lines > 10);
  for (const auto* ops : {&found.ops, &found.ops_bf16}) {
    for (const char* op : {"linear", "linear_weight_gradient", "attention", "adamw", "swiglu", "adamw@host"}) {
      CAPTURE(op);
      CHECK(ops->contains(op));
    }
  }
  // The nodes that hold a device up are not part of the result: clears of the step are too short to be recorded by
  // size.
  CHECK(found.ops.at("h2d").size() == 2);
  CHECK(found.ops.at("d2h").size() == 2);
  REQUIRE(found.beside.size() == 9);  // each lane beside one, the other, and both
  for (const auto& each : found.beside) CHECK(each.factor >= 1);
  CHECK(sg::parse_calibration(sg::to_json(found)) == found);
  const sg::OffloadRates rates = sg::offload_rates(found);
  CHECK(rates.h2d_bytes_per_s > 0);
  CHECK(rates != sg::usual_offload_rates);
  CHECK_THAT(sg::calibration_path(2, "NVIDIA H200").string(), EndsWith("-2-threads-NVIDIA-H200.json"));
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
  const int threads = GENERATE(2, 8);
  // ThreadSanitizer watches a command that calibrates with 2 threads: tests/tools/stepgraph/commands/simulate_test.cpp.
  if (sg::testing::sanitized() && (threads == 2 || sg::testing::sanitizer() == sg::testing::Sanitizer::thread)) return;
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
  // With 8 threads a trial has half of the heads for half of the sequences.
  std::vector<double> attention;
  for (const sg::RatePoint& point : found.ops.at("attention")) attention.push_back(point.flops);
  const double largest = *std::max_element(attention.begin(), attention.end());
  CHECK(std::count(attention.begin(), attention.end(), largest / 4) == (threads == 8 ? 1 : 0));
  for (const auto& [op, points] : found.ops) {
    CAPTURE(op);
    CHECK(std::all_of(points.begin(), points.end(), [&](const sg::RatePoint& point) {
      return (point.paired_s > 0) == (threads > 2) && (point.halved_s > 0) == (threads > 4);
    }));
  }
  CHECK(found.ops_bf16.contains("linear"));
  CHECK(found.device.empty());
  CHECK(found.disk.empty());
  CHECK_FALSE(found.ops.contains("disk_read"));
  CHECK(sg::parse_calibration(sg::to_json(found)) == found);
  CHECK_THROWS_MATCHES(sg::calibrate({}, {.threads = -1}), sg::Error, MessageMatches(ContainsSubstring("-1 threads")));
}

TEST_CASE("calibration with a disk measures reads and writes in its folder", "[graphs][calibration][disk]") {
  const sg::testing::TempFolder folder;
  int opened                  = 0;
  const auto files            = sg::spill_files(folder.path().string());
  const sg::Calibration found = sg::calibrate([](int ranks) { return std::make_unique<sg::LoopbackWorld>(ranks); },
                                              {.threads = 1,
                                               .steps   = 1,
                                               .small   = true,
                                               .disk    = folder.path().string() + "/.",
                                               .storage = [&](sg::Rank rank, std::int64_t size) {
                                                 ++opened;
                                                 return files(rank, size);
                                               }});
  CHECK(opened == 1);
  CHECK(found.disk == std::filesystem::canonical(folder.path()).string());
  for (const char* op : {"disk_read", "disk_write", "h2d", "d2h"}) {
    CAPTURE(op);
    CHECK(found.ops.contains(op));
  }
  CHECK(sg::parse_calibration(sg::to_json(found)) == found);
}
