#include "tools/bench/overhead/pairs.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tools/bench/overhead/overhead.hpp"

namespace stepgraph::bench {
namespace {

// Taskflow prepares all nodes on the calling thread. A run is 1.5 times as fast if its worker shares a core, and so a
// cache, with the caller, and the kernel keeps the placement that a process began with. So a sample is several runs
// with the caller on each core in turn: ours and Taskflow's get the same mixture.
class MovingThread {
 public:
  MovingThread() { sched_getaffinity(0, sizeof allowed_, &allowed_); }
  ~MovingThread() { sched_setaffinity(0, sizeof allowed_, &allowed_); }
  MovingThread(const MovingThread&)            = delete;
  MovingThread& operator=(const MovingThread&) = delete;

  void move(int turn) const {
    int skip = turn % std::max(1, CPU_COUNT(&allowed_));
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed_) || skip-- > 0) continue;
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      sched_setaffinity(0, sizeof one, &one);
      return;
    }
  }

 private:
  cpu_set_t allowed_{};
};

}  // namespace

double nanoseconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
}

Pairs alternate(const std::function<void()>& first, const std::function<void()>& second, std::uint32_t nodes,
                const OverheadOptions& options) {
  const int warm_ups = options.dry_run ? 0 : 3, pairs = options.dry_run ? 1 : options.pairs;
  const int runs = options.dry_run ? 1 : 8;
  MovingThread caller;
  const auto sample = [&](const std::function<void()>& run) {
    double total = 0;
    for (int k = 0; k < runs; ++k) {
      caller.move(k);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      total += nanoseconds(run);
    }
    return total / runs / nodes;
  };
  Pairs out;
  for (int i = -warm_ups; i < pairs; ++i) {
    double a = 0, b = 0;
    if (i % 2 == 0) a = sample(first);
    b = sample(second);
    if (i % 2 != 0) a = sample(first);
    if (i < 0) continue;
    out.first.push_back(a);
    out.second.push_back(b);
  }
  return out;
}

}  // namespace stepgraph::bench
