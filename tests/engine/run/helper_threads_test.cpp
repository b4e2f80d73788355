#include "engine/run/threads/helper_threads.hpp"

#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <thread>
#include <vector>

namespace sg = stepgraph;

TEST_CASE("a call to helper threads counts as queued until it starts", "[engine][executor][threads]") {
  struct Calls {
    std::atomic<int> started{0};
    std::atomic<bool> over{false};
  } calls;
  const auto work = [](void* argument, int) {
    auto& of = *static_cast<Calls*>(argument);
    ++of.started;
    while (!of.over) std::this_thread::yield();
  };
  const sg::NumaPlaces places(2);
  sg::HelperThreads threads(places);  // one helper
  threads.enqueue(0, work, &calls, 2);
  while (calls.started == 0) std::this_thread::yield();
  CHECK(threads.num_queued(0) == 0);
  for (int i = 0; i < 5; ++i) threads.enqueue(0, work, &calls, 2);
  CHECK(threads.num_queued(0) == 2);  // the helper is busy, and more calls are not queued
  calls.over = true;
  while (calls.started < 3) std::this_thread::yield();
  CHECK(threads.num_queued(0) == 0);
  CHECK(calls.started == 3);
}

TEST_CASE("more callers than helper threads have slots: each number is called once, by one owner or a helper",
          "[engine][executor][threads]") {
  constexpr int num_callers = 6, num_calls = 40, count = 5;
  struct Call {
    std::vector<std::atomic<int>> times = std::vector<std::atomic<int>>(count);
    std::atomic<std::thread::id> owner;
    std::atomic<bool> several{false}, over{false};
  };
  const auto work = [](void* argument, int i, bool owner) noexcept {
    auto& call = *static_cast<Call*>(argument);
    ++call.times[static_cast<std::size_t>(i)];
    std::this_thread::yield();
    if (!owner) return;
    std::thread::id none, here = std::this_thread::get_id();
    if (!call.owner.compare_exchange_strong(none, here) && none != here) call.several = true;
    if (call.over) call.several = true;
  };
  const sg::NumaPlaces places(2);
  sg::HelperThreads threads(places);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < num_callers; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < num_calls; ++i) {
        Call call;
        threads.run(0, work, &call, count);
        call.over = true;
        for (const auto& times : call.times) wrong += times != 1;
        wrong += call.several || call.owner.load() == std::thread::id();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
}
