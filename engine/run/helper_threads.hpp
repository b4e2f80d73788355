#pragma once
#include <memory>

namespace stepgraph {

// The TBB threads of an executor that help with parallel kernels. Thread-safe.
class HelperThreads {
 public:
  explicit HelperThreads(int threads);
  [[nodiscard]] static int most(int threads);  // the most threads that it starts
  ~HelperThreads();                            // waits until everything enqueued is done
  HelperThreads(const HelperThreads&)            = delete;
  HelperThreads& operator=(const HelperThreads&) = delete;

  // Calls it on a TBB thread, at some later time. False: no thread can be started.
  [[nodiscard]] bool enqueue(void (*work)(void*), void* argument) noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stepgraph
