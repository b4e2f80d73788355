#include "backends/process/watchdog.hpp"

#include <unistd.h>

#include <cstdio>
#include <iostream>

#include "engine/base/error.hpp"
#include "engine/base/partial.hpp"

namespace stepgraph {

Watchdog::Watchdog(std::string what, std::chrono::milliseconds time, std::function<void()> on_late)
    : thread_([this, time, what = std::move(what), on_late = std::move(on_late)] {
        std::unique_lock lock(mutex_);
        if (ended_.wait_for(lock, time, [this] { return over_; })) return;
        lock.unlock();
        if (on_late) return on_late();
        std::cerr << str("stepgraph: ", what, " has not ended after ", time.count(), " ms\n") << std::flush;
        end_process(3);
      }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  ended_.notify_all();
  thread_.join();
}

void end_process(int status) noexcept {
  remove_own_partials();
  ::_exit(status);
}

}  // namespace stepgraph
