#pragma once
#include <memory>

namespace stepgraph {

// The TBB threads of an executor that help with parallel kernels. Thread-safe.
class HelperThreads {
 public:
  explicit HelperThreads(int threads);
  [[nodiscard]] static int most(int threads);  // the most threads that it starts
  ~HelperThreads();                            // waits for work that runs; work that has not started never starts
  HelperThreads(const HelperThreads&)            = delete;
  HelperThreads& operator=(const HelperThreads&) = delete;

  // Calls it on a TBB thread at some later time, if TBB has a thread for it. Does nothing while `most` calls have not
  // started yet.
  void enqueue(void (*work)(void*), void* argument, int most) noexcept;
  [[nodiscard]] int num_queued() const noexcept;  // calls that have not started yet

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stepgraph
