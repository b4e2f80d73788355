// Several threads that use one executor at a time.
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/executor.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;

TEST_CASE("a thread that starts a step while the step of another thread ends is refused, or starts it",
          "[engine][executor][threads]") {
  sg::Graph graph;
  graph.add({.name = "work"}, [] {});
  sg::LoopbackWorld world(1);
  const sg::Program mine(graph, world), theirs(graph, world);
  sg::Executor executor({.threads = 1});
  std::atomic<bool> over{false};
  std::atomic<int> refused{0};
  std::mutex mutex;
  std::vector<std::string> others;  // messages of all other errors
  const auto start = [&](const sg::Program& program) {
    try {
      executor.run(program);
    } catch (const sg::Error& error) {
      if (std::string_view(error.what()).find("a step is still under way") != std::string_view::npos) {
        ++refused;
        return;
      }
      const std::lock_guard lock(mutex);
      others.emplace_back(error.what());
    }
  };
  std::thread other([&] {
    while (!over) start(theirs);
  });
  int runs = 0;
  for (; runs < sg::testing::cases(20'000) || refused == 0; ++runs) start(mine);
  over = true;
  other.join();
  CHECK(refused > 0);
  CHECK(others == std::vector<std::string>());
}
