#include "engine/run/peers.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/run/packed.hpp"
#include "tests/support/worlds/thread_peers.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

// What `call` throws in each process; empty: nothing.
std::vector<std::string> errors_of(int processes, const std::function<void(sg::Peers&)>& call) {
  sg::testing::PeersHub hub(processes);
  std::vector<std::string> errors(static_cast<std::size_t>(processes));
  std::vector<std::thread> threads;
  for (int process = 0; process < processes; ++process) {
    threads.emplace_back([&, process] {
      try {
        call(hub.of(process));
      } catch (const sg::Error& error) {
        errors[static_cast<std::size_t>(process)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

}  // namespace

TEST_CASE("the error of process 0 is thrown in every process, with its kind", "[engine][peers][threads]") {
  const auto fails = errors_of(3, [](sg::Peers& peers) {
    std::optional<sg::Error> error;
    if (peers.process() == 0) error.emplace(sg::ErrorKind::run, "no room");
    try {
      peers.require_success("a file", error);
    } catch (const sg::Error& caught) {
      if (caught.kind() == sg::ErrorKind::run) throw;
    }
  });
  CHECK(fails == std::vector<std::string>(3, "no room"));
  CHECK(errors_of(3, [](sg::Peers& peers) { peers.require_success("a file", {}); }) == std::vector<std::string>(3));
}

TEST_CASE("any exception of the work of process 0 is thrown in every process", "[engine][peers][threads]") {
  const auto fails = errors_of(
      3, [](sg::Peers& peers) { sg::in_first(&peers, "a file", [] { throw std::runtime_error("no room"); }); });
  CHECK(fails == std::vector<std::string>(3, "a file: no room"));
  int calls = 0;
  sg::in_first(nullptr, "a file", [&] { ++calls; });
  CHECK(calls == 1);
}

TEST_CASE("the error of the first process whose work fails is thrown in every process", "[engine][peers][threads]") {
  const auto fails = errors_of(4, [](sg::Peers& peers) {
    sg::in_all(&peers, "a file", [&] {
      if (peers.process() == 1) throw sg::Error(sg::ErrorKind::backend, "process 1 fails");
      if (peers.process() == 2) throw std::runtime_error("process 2 fails");
    });
  });
  CHECK(fails == std::vector<std::string>(4, "process 1 fails"));
  const auto last = errors_of(2, [](sg::Peers& peers) {
    sg::in_all(&peers, "a file", [&] {
      if (peers.process() == 1) throw std::runtime_error("no room");
    });
  });
  CHECK(last == std::vector<std::string>(2, "a file: no room"));
  int calls = 0;
  sg::in_all(nullptr, "a file", [&] { ++calls; });
  CHECK(calls == 1);
  CHECK(errors_of(2, [](sg::Peers& peers) { sg::in_all(&peers, "a file", [] {}); }) == std::vector<std::string>(2));
}

TEST_CASE("texts that differ, and calls that differ, are named in every process", "[engine][peers][threads]") {
  const auto texts =
      errors_of(3, [](sg::Peers& peers) { peers.require_same("config", peers.process() == 2 ? "dp 2" : "dp 4"); });
  for (const std::string& text : texts) {
    CHECK_THAT(text, ContainsSubstring("config: process 0 has 'dp 4', process 2 has 'dp 2'"));
  }
  const auto calls = errors_of(2, [](sg::Peers& peers) { peers.barrier(peers.process() == 0 ? "one" : "two"); });
  for (const std::string& text : calls) CHECK_THAT(text, ContainsSubstring("one") && ContainsSubstring("two"));
}

TEST_CASE("processes of one machine count each other", "[engine][peers][threads]") {
  CHECK(errors_of(3, [](sg::Peers& peers) {
          if (sg::num_on_machine(peers) != 3) throw sg::Error(sg::ErrorKind::run, "miscounted");
        }) == std::vector<std::string>(3));
}

TEST_CASE("clocks of one machine are equal", "[engine][peers][threads]") {
  CHECK(errors_of(3, [](sg::Peers& peers) {
          if (sg::clock_offset(peers).count() != 0) throw sg::Error(sg::ErrorKind::run, "they differ");
        }) == std::vector<std::string>(3));
}

TEST_CASE("packed values come back in order, and too few bytes are refused", "[engine][peers]") {
  const std::vector<double> numbers{1.5, -2};
  const sg::Bytes bytes =
      sg::Packer().add(7).add_text("text").add_list(std::span<const double>(numbers)).add(true).take();
  sg::Unpacker in(bytes);
  CHECK(in.get<int>() == 7);
  CHECK(in.get_text() == "text");
  CHECK(in.get_list<double>() == numbers);
  CHECK_FALSE(in.empty());
  CHECK(in.get<bool>());
  CHECK(in.empty());
  CHECK_THROWS_AS(in.get<int>(), sg::Error);
  sg::Unpacker short_list{std::span(bytes).subspan(0, 14)};
  CHECK(short_list.get<int>() == 7);
  CHECK_THROWS_AS(short_list.get_text(), sg::Error);
}
