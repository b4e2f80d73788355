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

  // Calls work(argument, i, owner) for i from 0 to count - 1, on one thread that owns the call and on TBB threads that
  // have nothing else to do, and returns when all are done. The owner is the calling thread or, while no slot of the
  // arena is free for it, a TBB thread that takes its place. A thread tends to get the same numbers in each call. Where
  // TBB has no memory, calls may be made twice.
  using Work = void (*)(void* argument, int i, bool owner) noexcept;
  void run(Work work, void* argument, int count) noexcept;
  [[nodiscard]] bool can_run() const noexcept;  // on more than one thread: TBB has threads beside that of the caller

  // Calls it on a TBB thread at some later time, if TBB has a thread for it. Does nothing while `most` calls have not
  // started yet.
  void enqueue(void (*work)(void*), void* argument, int most) noexcept;
  [[nodiscard]] int num_queued() const noexcept;  // calls that have not started yet

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stepgraph
