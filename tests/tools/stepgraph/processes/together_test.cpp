#include "tools/stepgraph/processes/together.hpp"

#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <csignal>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/run/peers.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/worlds/thread_processes.hpp"

namespace sg  = stepgraph;
namespace cli = stepgraph::cli;
using Catch::Matchers::ContainsSubstring;
using sg::testing::error_of;
using sg::testing::Exchanges;
using sg::testing::in_processes;
using sg::testing::neighbours;

namespace {

// What each of three processes returns, by process.
template <class Result>
std::vector<Result> of_processes(const std::function<Result(sg::World&, int process)>& call) {
  std::mutex mutex;
  std::vector<Result> results(3);
  in_processes(neighbours(3, 3), Exchanges::hub, [&](sg::World& world) {
    const int process  = world.peers()->process();
    const Result found = call(world, process);
    const std::lock_guard lock(mutex);
    results[static_cast<std::size_t>(process)] = found;
  });
  return results;
}

}  // namespace

TEST_CASE("all processes stop for the reason of the first one that has one", "[tools][processes][threads]") {
  const auto none = of_processes<bool>([](sg::World& world, int) { return cli::agree(world, cli::Stop{}).wanted(); });
  CHECK(none == std::vector<bool>(3, false));
  const auto signal = of_processes<int>([](sg::World& world, int process) {
    return cli::agree(world, {.signal = process == 0 ? 0 : SIGINT + process - 1}).signal;
  });
  CHECK(signal == std::vector<int>(3, SIGINT));
  const auto failure = of_processes<std::string>([](sg::World& world, int process) {
    cli::Stop mine;
    if (process == 2) mine.failure.emplace(sg::ErrorKind::run, "the data ends");
    const cli::Stop stop = cli::agree(world, mine);
    return std::string(stop.failure && stop.failure->kind() == sg::ErrorKind::run ? stop.failure->what() : "");
  });
  CHECK(failure == std::vector<std::string>(3, "the data ends"));
  const auto closed = of_processes<bool>(
      [](sg::World& world, int process) { return cli::agree(world, {.output_closed = process == 0}).output_closed; });
  CHECK(closed == std::vector<bool>(3, true));
  sg::LoopbackWorld alone(2);
  CHECK(cli::agree(alone, {.signal = SIGTERM}).signal == SIGTERM);
}

TEST_CASE("a checkpoint is due for all if it is for one, and written if all have written",
          "[tools][processes][threads]") {
  const auto said = [](const std::function<cli::Boundary(int process)>& mine) {
    return of_processes<std::string>([&](sg::World& world, int process) {
      const cli::Boundary agreed = cli::agree(world, mine(process));
      return std::string(agreed.save ? "due " : "") + (agreed.written ? "written " : "") +
             (agreed.stop.wanted() ? "stop" : "");
    });
  };
  const auto all = [](const std::string& text) { return std::vector<std::string>(3, text); };
  CHECK(said([](int) { return cli::Boundary{}; }) == all(""));
  CHECK(said([](int process) { return cli::Boundary{.save = process == 0}; }) == all("due "));
  CHECK(said([](int process) { return cli::Boundary{.written = process != 1}; }) == all(""));
  CHECK(said([](int) { return cli::Boundary{.written = true}; }) == all("written "));
  CHECK(said([](int process) {
          return cli::Boundary{.stop = {.signal = process == 2 ? SIGTERM : 0}, .save = process == 0, .written = true};
        }) == all("due written stop"));
}

TEST_CASE("a value of process 0 reaches all processes", "[tools][processes][threads]") {
  const auto values = of_processes<std::string>([](sg::World& world, int process) {
    return cli::from_first(world, "a value", [&] { return std::string("of ") + std::to_string(process); });
  });
  CHECK(values == std::vector<std::string>(3, "of 0"));
  sg::LoopbackWorld alone(1);
  CHECK(cli::from_first(alone, "a value", [] { return std::string("mine"); }) == "mine");
}

TEST_CASE("work of process 0 is done once, and its error is thrown in all processes", "[tools][processes][threads]") {
  std::atomic<int> calls{0};
  const auto errors = of_processes<std::string>([&](sg::World& world, int) {
    return error_of([&] {
      cli::in_first(world, "a file", [&] {
        ++calls;
        throw sg::Error(sg::ErrorKind::config, "it exists");
      });
    });
  });
  CHECK(calls == 1);
  CHECK(errors == std::vector<std::string>(3, "it exists"));
}

TEST_CASE("processes with other configs, data or models are refused in all processes", "[tools][processes][threads]") {
  const sg::testing::TempFolder folder;
  const auto write = [&](const std::string& name, const std::string& text) {
    std::ofstream((folder / name).string()) << text;
    return (folder / name).string();
  };
  const std::string one   = write("one.txt", std::string(20'000, 'a')),
                    other = write("other.txt", std::string(20'000, 'b'));
  const auto with         = [&](const std::vector<std::string>& changes) {
    return sg::parse_config(R"({"model": {}, "data": {"synthetic": 1}, "batch": {}})", changes);
  };
  const auto errors = [&](const std::function<sg::Config(int)>& config) {
    return of_processes<std::string>([&](sg::World& world, int process) {
      return error_of([&] { cli::require_same_job(world, config(process)); });
    });
  };
  CHECK(errors([&](int process) { return with({sg::str("threads=", process + 1)}); }) == std::vector<std::string>(3));
  for (const std::string& error :
       errors([&](int process) { return with({sg::str("optimizer.lr=", process == 1 ? 0.25 : 0.5)}); }))
    CHECK_THAT(error, ContainsSubstring("config: process 0 has") && ContainsSubstring("process 1 has"));
  // The same name, other bytes: as on two machines.
  const std::string place = (folder / "data.txt").string();
  CHECK(cli::sample_file(one) != cli::sample_file(other));
  CHECK(cli::sample_file(one) == cli::sample_file(one));
  CHECK_THAT(cli::sample_file(one), ContainsSubstring("20000 bytes"));
  CHECK(cli::sample_file(place) == "missing");
  CHECK(cli::sample_file(write("empty.txt", "")) != cli::sample_file(write("byte.txt", "x")));
}
