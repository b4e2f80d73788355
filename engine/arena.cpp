#include "engine/arena.hpp"

#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <atomic>

#include "engine/tsan.hpp"

namespace stepgraph {

struct Arena::Impl {
  explicit Impl(int threads) : arena(std::max(threads, 2), /*reserved_for_masters=*/0) {}
  tbb::task_arena arena;
  std::atomic<int> under_way{0};  // enqueued and not yet done
};

Arena::Arena(int threads) : impl_(std::make_unique<Impl>(threads)) {}

// A helper that comes too late to help still looks at what its executor lent it.
Arena::~Arena() {
  for (int left; (left = impl_->under_way.load()) > 0;) impl_->under_way.wait(left);
}

void Arena::enqueue(std::function<void()> work) {
  // On the heap, for its address: what ThreadSanitizer is told about must be the same on both sides.
  auto* const job = new std::function<void()>(std::move(work));
  Impl& impl      = *impl_;
  impl.under_way.fetch_add(1);
  tsan::release(job);
  impl.arena.enqueue([job, &impl] {
    tsan::acquire(job);
    (*job)();
    delete job;
    if (impl.under_way.fetch_sub(1) == 1) impl.under_way.notify_all();
  });
}

}  // namespace stepgraph
