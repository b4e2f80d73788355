#include "graphs/plan/offload_plan.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>

#include "engine/base/error.hpp"
#include "graphs/plan/memory_preset.hpp"
#include "graphs/plan/plan.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using sg::OffloadPlan;
using sg::OffloadStrategy;

namespace {

std::string refusal(const OffloadPlan& plan, std::int64_t machine_bytes = 0) {
  try {
    sg::check_offload(plan);
    sg::check_host_bytes(plan, machine_bytes);
    return {};
  } catch (const sg::Error& error) {
    CHECK(error.kind() == sg::ErrorKind::config);
    return error.what();
  }
}

}  // namespace

TEST_CASE("strategies have thresholds and shares", "[graphs][plan][offload]") {
  CHECK(sg::pressure_threshold(OffloadStrategy::conservative) == 0.9);
  CHECK(sg::pressure_threshold(OffloadStrategy::balanced) == 0.75);
  CHECK(sg::pressure_threshold(OffloadStrategy::aggressive) == 0.6);
  CHECK(sg::pressure_threshold(OffloadStrategy::extreme) == 0.4);
  CHECK_THROWS_AS(sg::pressure_threshold(OffloadStrategy::manual), sg::Error);
  CHECK(sg::most_share(OffloadStrategy::manual) == 1);
  CHECK(sg::most_share(OffloadStrategy::conservative) == 0.2);
  CHECK(sg::most_share(OffloadStrategy::balanced) == 0.5);
  CHECK(sg::most_share(OffloadStrategy::aggressive) == 0.8);
  CHECK(sg::most_share(OffloadStrategy::extreme) == 1);
  for (const OffloadStrategy strategy : sg::all_offload_strategies)
    CHECK(sg::may_use_disk(strategy) == (strategy == OffloadStrategy::manual || strategy == OffloadStrategy::extreme));
}

TEST_CASE("a strategy may move all classes, or those that its fields name", "[graphs][plan][offload]") {
  CHECK_FALSE(OffloadPlan{}.moves_something());
  CHECK_FALSE(OffloadPlan{.device_bytes = 1}.moves_something());
  CHECK(OffloadPlan{.activations = true}.moves_something());
  CHECK(OffloadPlan{.strategy = OffloadStrategy::balanced}.moves_something());
  const OffloadPlan manual{.params = true};
  CHECK(manual.may_move(manual.params));
  CHECK_FALSE(manual.may_move(manual.grads));
  const OffloadPlan all{.strategy = OffloadStrategy::extreme};
  CHECK(all.may_move(all.params));
  const OffloadPlan some{.optimizer = true, .strategy = OffloadStrategy::extreme};
  CHECK(some.may_move(some.optimizer));
  CHECK_FALSE(some.may_move(some.params));
}

TEST_CASE("an offload plan that cannot be is refused with its numbers", "[graphs][plan][offload][refuses]") {
  CHECK(refusal({}).empty());
  CHECK(refusal({.device_bytes = -1}) == "offload.device_bytes: -1 is negative (a number of bytes; 0: no limit)");
  CHECK(refusal({.params = true, .device_param_bytes = -2}) ==
        "offload.device_param_bytes: -2 is negative (a number of bytes; 0: no limit)");
  CHECK(refusal({.params = true, .host_bytes = -3}) ==
        "offload.host_bytes: -3 is negative (a number of bytes; 0: no limit)");
  CHECK(refusal({.params = true, .disk_bytes = -4}) ==
        "offload.disk_bytes: -4 is negative (a number of bytes; 0: no limit)");
  CHECK(refusal({.params = true, .slots = 0}) == "offload.slots: 0 slots hold no unit (1 or more)");
  CHECK(refusal({.params = true, .host_bytes = 2049}, 2048) ==
        "offload.host_bytes: 2049 is above the memory of this machine (at most 2048, 2.0 KiB)");
  CHECK(refusal({.params = true, .host_bytes = 20'001}, 20'000) ==
        "offload.host_bytes: 20001 is above the memory of this machine (at most 20000, 19.5 KiB)");
  CHECK(refusal({.params = true, .host_bytes = 2048}, 2048).empty());
  // Each rank has such a budget.
  const OffloadPlan each{.params = true, .host_bytes = 1025};
  CHECK_NOTHROW(sg::check_host_bytes(each, 2050, "this machine", 2));
  CHECK_THROWS_WITH(sg::check_host_bytes(each, 2049, "this machine", 2),
                    "offload.host_bytes: 1025 for each of 2 ranks is above the memory of this machine, 2049 (2.0 KiB) "
                    "(at most 1024, 1.0 KiB)");
  CHECK(refusal({.params = true, .host_bytes = std::int64_t{1} << 60}).empty());  // of a machine that is not known
}

TEST_CASE("the folder of a disk is checked where a step runs, and not in a plan", "[graphs][plan][offload]") {
  const sg::testing::TempFolder folder;
  const std::string there = folder.path().string();
  folder.put("file", "text");
  CHECK(refusal({.params = true, .disk = there + "/none"}).empty());
  CHECK_NOTHROW(sg::check_disk_folder(""));
  CHECK_NOTHROW(sg::check_disk_folder(there));
  CHECK_THROWS_WITH(sg::check_disk_folder(there + "/none"),
                    "offload.disk: '" + there + "/none' does not exist (a folder that exists)");
  CHECK_THROWS_WITH(sg::check_disk_folder(there + "/file"),
                    "offload.disk: '" + there + "/file' is a file (a folder that exists)");
}

TEST_CASE("offload is part of a plan, and presets of memory leave it alone", "[graphs][plan][offload]") {
  const sg::Plan with{.offload = {.optimizer = true}};
  CHECK(with == with);
  CHECK(with != sg::Plan{});
  for (const sg::MemoryPreset preset : sg::all_memory_presets)
    CHECK(sg::with_preset(with, preset).offload == with.offload);
}
