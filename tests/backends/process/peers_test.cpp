#include "backends/process/peers.hpp"

#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <memory>

#include "engine/base/error.hpp"
#include "tests/backends/process/processes.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using sg::testing::connected_pair;
using sg::testing::error_of;
using sg::testing::run_processes;

namespace {

// The peers of all processes.
std::vector<std::unique_ptr<sg::SocketPeers>> make_peers(int size, sg::SocketPeersOptions options = {}) {
  std::vector<std::unique_ptr<sg::SocketPeers>> all;
  for (int process = 0; process < size; ++process) {
    options.process       = process;
    options.num_processes = size;
    all.push_back(std::make_unique<sg::SocketPeers>(options));
    if (process == 0) continue;
    auto [here, there] = connected_pair();
    all[0]->connect(process, std::move(here));
    all.back()->connect(0, std::move(there));
  }
  return all;
}

sg::Peers& at(std::vector<std::unique_ptr<sg::SocketPeers>>& all, int process) {
  return *all[static_cast<std::size_t>(process)];
}

}  // namespace

TEST_CASE("process 0 gathers the bytes of all, and all get what it broadcasts", "[backends][process]") {
  const int size              = GENERATE(1, 2, 5);
  const std::size_t num_bytes = GENERATE(0, 1, 100'000, 9'000'001);
  CAPTURE(size, num_bytes);
  auto all = make_peers(size);
  std::vector<sg::Bytes> gathered;
  std::vector<sg::Bytes> received(static_cast<std::size_t>(size));
  const auto bytes_of = [&](int process) {
    return sg::Bytes(num_bytes / static_cast<std::size_t>(process + 1), static_cast<std::byte>(process + 1));
  };
  const auto errors = run_processes(size, [&](int process) {
    for (int turn = 0; turn < 2; ++turn) {
      auto mine = at(all, process).gather("sizes", bytes_of(process));
      if (process == 0) gathered = std::move(mine);
      received[static_cast<std::size_t>(process)] =
          at(all, process).broadcast("weights", process == 0 ? bytes_of(7) : sg::Bytes());
    }
  });
  CHECK(errors == std::vector<std::string>(static_cast<std::size_t>(size)));
  REQUIRE(gathered.size() == static_cast<std::size_t>(size));
  for (int process = 0; process < size; ++process) {
    CHECK(gathered[static_cast<std::size_t>(process)] == bytes_of(process));
    CHECK(received[static_cast<std::size_t>(process)] == bytes_of(7));
  }
}

TEST_CASE("a barrier ends when all have reached it", "[backends][process]") {
  auto all                   = make_peers(4);
  std::atomic<int> num_there = 0;
  std::atomic<bool> early    = false;
  const auto errors          = run_processes(4, [&](int process) {
    for (int turn = 1; turn <= 20; ++turn) {
      ++num_there;
      at(all, process).barrier("turn");
      if (num_there < 4 * turn) early = true;
      at(all, process).barrier("next turn");
    }
  });
  CHECK(errors == std::vector<std::string>(4));
  CHECK_FALSE(early);
}

TEST_CASE("equal texts pass, and a difference is an error everywhere with both texts", "[backends][process]") {
  auto all = make_peers(4);
  const std::string text(500, 'x');
  const auto errors = run_processes(4, [&](int process) {
    at(all, process).require_same("version", "1.0");
    at(all, process).require_same("config", text + (process == 2 ? "lr 0.1" : "lr 0.2") + text);
  });
  for (const std::string& error : errors) {
    CHECK_THAT(error, ContainsSubstring("config: process 0 has '...xxx"));
    CHECK_THAT(error,
               ContainsSubstring("lr 0.2x") && ContainsSubstring("process 2 has") && ContainsSubstring("lr 0.1x"));
    CHECK(error.size() < 500);
  }
  const auto later = run_processes(4, [&](int process) { at(all, process).require_same("data", "same"); });
  CHECK(later == std::vector<std::string>(4));  // a difference is no failure of the peers
}

TEST_CASE("processes with different calls get an error that names both", "[backends][process]") {
  const bool large = GENERATE(false, true);  // more than the system buffers: both ends would send for ever
  const auto kinds =
      GENERATE(std::pair{true, true}, std::pair{true, false}, std::pair{false, true}, std::pair{false, false});
  static int seen = 0;
  if (sg::testing::left_out(seen, 3)) return;
  CAPTURE(large, kinds.first, kinds.second);
  auto all = make_peers(3);
  const sg::Bytes bytes(large ? std::size_t{40} << 20 : 10);
  const auto errors = run_processes(3, [&](int process) {
    const bool odd = process == 1;
    if (odd ? kinds.first : kinds.second) {
      static_cast<void>(at(all, process).gather(odd ? "loss" : "norm", bytes));
    } else {
      static_cast<void>(at(all, process).broadcast(odd ? "loss" : "norm", bytes));
    }
    at(all, process).barrier("end");  // one that did not wait learns of it here
  });
  for (const std::string& error : errors) CHECK_THAT(error, ContainsSubstring("'loss'") && ContainsSubstring("'norm'"));
  CHECK_THAT(error_of([&] { at(all, 0).barrier("after"); }), ContainsSubstring("'loss'"));
}

TEST_CASE("a closed connection is an error with the text that explains it", "[backends][process]") {
  auto all = make_peers(3, {.explain = [](int process, const std::string& problem) {
                          return "rank " + std::to_string(process) + " was killed: " + problem;
                        }});
  all[2].reset();
  const auto errors = run_processes(2, [&](int process) { at(all, process).barrier("step"); });
  for (const std::string& error : errors)  // process 0 has told process 1
    CHECK_THAT(error, ContainsSubstring("rank 2 was killed") && ContainsSubstring("closed"));
}

TEST_CASE("a peer that never comes is not waited for longer than allowed", "[backends][process]") {
  auto all          = make_peers(2, {.silence = 50ms});
  const auto errors = run_processes(2, [&](int process) { static_cast<void>(at(all, process).broadcast("x", {})); });
  CHECK(errors == std::vector<std::string>(2));
  CHECK_THAT(error_of([&] { static_cast<void>(at(all, 1).broadcast("x", {})); }), ContainsSubstring("process 0"));
  sg::SocketPeers alone({.process = 0, .num_processes = 2, .silence = 50ms});  // none has connected
  CHECK_THAT(error_of([&] { alone.barrier("x"); }), ContainsSubstring("has not connected in time"));
}

TEST_CASE("an interrupt ends all waits with its reason", "[backends][process]") {
  sg::Interrupt interrupt;
  auto all = make_peers(3, {.interrupt = &interrupt});
  sg::SocketPeers alone({.process = 0, .num_processes = 2, .interrupt = &interrupt});
  std::vector<std::string> errors;
  std::string error_alone;
  std::thread waiting([&] { errors = run_processes(2, [&](int process) { at(all, process).barrier("step"); }); });
  std::thread unconnected([&] { error_alone = error_of([&] { alone.barrier("step"); }); });
  std::this_thread::sleep_for(20ms);
  interrupt.raise("rank 2 is gone");
  waiting.join();
  unconnected.join();
  CHECK(errors == std::vector<std::string>(2, "rank 2 is gone"));
  CHECK(error_alone == "rank 2 is gone");
}
