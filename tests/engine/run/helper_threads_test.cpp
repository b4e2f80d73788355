#include "engine/run/helper_threads.hpp"

#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <thread>

namespace sg = stepgraph;

TEST_CASE("a call to helper threads counts as queued until it starts", "[engine][executor][threads]") {
  struct Calls {
    std::atomic<int> started{0};
    std::atomic<bool> over{false};
  } calls;
  const auto work = [](void* argument) {
    auto& of = *static_cast<Calls*>(argument);
    ++of.started;
    while (!of.over) std::this_thread::yield();
  };
  sg::HelperThreads threads(2);  // one helper
  threads.enqueue(work, &calls, 2);
  while (calls.started == 0) std::this_thread::yield();
  CHECK(threads.num_queued() == 0);
  for (int i = 0; i < 5; ++i) threads.enqueue(work, &calls, 2);
  CHECK(threads.num_queued() == 2);  // the helper is busy, and more calls are not queued
  calls.over = true;
  while (calls.started < 3) std::this_thread::yield();
  CHECK(threads.num_queued() == 0);
  CHECK(calls.started == 3);
}
