#pragma once
#include <memory>

namespace stepgraph {

// The TBB threads of an executor that help with parallel kernels. Thread-safe.
class HelperThreads {
 public:
  explicit HelperThreads(int threads);
  ~HelperThreads();  // waits until everything enqueued is done
  HelperThreads(const HelperThreads&)            = delete;
  HelperThreads& operator=(const HelperThreads&) = delete;

  void enqueue(void (*work)(void*), void* argument);  // calls it on a TBB thread, at some later time

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stepgraph
