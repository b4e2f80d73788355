#pragma once
#include <memory>

namespace stepgraph {

// The one TBB arena of an executor: where helpers of parallel kernels come from. Thread-safe.
class Arena {
 public:
  explicit Arena(int threads);
  ~Arena();  // waits until everything enqueued is done
  Arena(const Arena&)            = delete;
  Arena& operator=(const Arena&) = delete;

  void enqueue(void (*work)(void*), void* argument);  // calls it on some TBB thread, some time

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stepgraph
