#pragma once
#include <memory>

#include "engine/run/threads/numa_places.hpp"

namespace stepgraph {

// The TBB threads of an executor that help with parallel kernels. Each NUMA node has an arena of its own, and a thread
// is bound to the node while it is in the arena. Thread-safe.
class HelperThreads {
 public:
  // `places` must outlive it.
  explicit HelperThreads(const NumaPlaces& places);
  [[nodiscard]] static int most(const NumaPlaces& places);  // the most threads that it starts
  ~HelperThreads();  // waits for work that runs; work that has not started never starts
  HelperThreads(const HelperThreads&)            = delete;
  HelperThreads& operator=(const HelperThreads&) = delete;

  // Calls work(argument, i, owner) for i from 0 to count - 1, on one thread that owns the call and on TBB threads of
  // the node that have nothing else to do, and returns when all are done. The owner is the calling thread or, while no
  // slot of the arena is free for it, a TBB thread that takes its place. A thread tends to get the same numbers in each
  // call. Where TBB has no memory, calls may be made twice.
  using Work = void (*)(void* argument, int i, bool owner) noexcept;
  void run(int node, Work work, void* argument, int count) noexcept;
  [[nodiscard]] bool can_run() const noexcept;  // on more than one thread: TBB has threads beside that of the caller

  // Calls work(argument, node) on a TBB thread of the node at some later time, if TBB has a thread for it. Does nothing
  // while `most` calls for the node have not started yet.
  void enqueue(int node, void (*work)(void*, int), void* argument, int most) noexcept;
  [[nodiscard]] int num_queued(int node) const noexcept;  // calls that have not started yet

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stepgraph
