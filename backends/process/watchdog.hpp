#pragma once
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace stepgraph {

// For calls that can hang and that nothing else can end, such as MPI_Init. If it still lives after `time`, it calls
// `on_late` on a thread of its own.
class Watchdog {
 public:
  // By default, prints "stepgraph: WHAT has not ended after TIME" to stderr and ends the process with status 3.
  Watchdog(std::string what, std::chrono::milliseconds time, std::function<void()> on_late = {});
  ~Watchdog();
  Watchdog(const Watchdog&)            = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool over_ = false;
  std::thread thread_;
};

// Ends the process at once with an exit status: without destructors, which could wait for threads that hang. Temporary
// files of this process are removed (engine/base/partial.hpp).
[[noreturn]] void end_process(int status) noexcept;

}  // namespace stepgraph
