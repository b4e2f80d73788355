// What commands say about offload beside their results: settings without effect, and the disk that was measured.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <filesystem>

#include "engine/base/error.hpp"
#include "graphs/predict/calibration.hpp"
#include "tests/support/processes/command_run.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::SmallRun;

namespace {

std::string put_machine(const SmallRun& small, const std::string& disk) {
  const std::string path = small.path("machine.json");
  sg::save_calibration({.host    = sg::host_name(),
                        .disk    = disk,
                        .cores   = 4,
                        .threads = 1,
                        .ops     = {{"linear", {{1e6, 1e4, 1e-3, 1e-3}}}, {"disk_read", {{0, 1e6, 1e-3, 1e-3}}}}},
                       path);
  return path;
}

}  // namespace

TEST_CASE("commands note settings of offload without effect, and go on", "[tools][offload]") {
  const SmallRun small;
  const std::string disk = small.path("spill");
  std::filesystem::create_directory(disk);
  const std::string simulate = "--machine " + put_machine(small, "") + " ";
  const std::string roomy    = "--set offload.optimizer=true --set offload.disk=" + disk + " --set offload.host_bytes=";
  for (const auto& [command, more] : {std::pair<std::string, std::string>{"train", "--steps 1 "},
                                      {"verify", ""},
                                      {"plan-memory", ""},
                                      {"simulate", simulate}}) {
    if (sg::testing::sanitized() && command != "train" && command != "simulate") continue;
    CAPTURE(command);
    const auto idle = small.run(command.c_str(), more + roomy + "1GiB");
    CAPTURE(idle.err);
    CHECK(idle.exit_code == 0);
    CHECK_THAT(idle.err, ContainsSubstring("stepgraph " + command +
                                           ": note: offload.disk has no effect: host memory has room for all that is "
                                           "moved\n"));
    CHECK(idle.err.find("note: ") == idle.err.rfind("note: "));
    CHECK_THAT(idle.out, !ContainsSubstring("note: "));
    CHECK_THAT(small.run(command.c_str(), more + roomy + "64KiB").err, !ContainsSubstring("note: "));
    const auto fits = small.run(
        command.c_str(), more + "--set offload.params=true --set offload.device_bytes=1GiB --set offload.slots=3");
    CHECK(fits.exit_code == 0);
    CHECK_THAT(fits.err, ContainsSubstring("note: offload.slots has no effect: nothing is moved, because the step fits "
                                           "the device\n"));
  }
}

TEST_CASE("simulate says if the disk was measured in another folder", "[tools][simulate][offload]") {
  const SmallRun small;
  const std::string disk = small.path("spill");
  std::filesystem::create_directory(disk);
  const auto said = [&](const std::string& measured, const std::string& host_bytes) {
    const auto outcome =
        small.run("simulate", "--machine " + put_machine(small, measured) +
                                  " --set offload.optimizer=true --set offload.host_bytes=" + host_bytes +
                                  " --set offload.disk=" + disk);
    CAPTURE(outcome.err);
    CHECK(outcome.exit_code == 0);
    return outcome.err.find("the disk was measured in '/elsewhere', but offload.disk is '" +
                            std::filesystem::canonical(disk).string() + "' (--calibrate") != std::string::npos;
  };
  CHECK(said("/elsewhere", "64KiB"));
  CHECK_FALSE(said("/elsewhere", "1GiB"));  // the disk is not used
  CHECK_FALSE(said(std::filesystem::canonical(disk).string(), "64KiB"));
  CHECK_FALSE(said("", "64KiB"));  // no disk was measured: disk_write is in the list of such ops
}
