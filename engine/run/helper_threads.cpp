#include "engine/run/helper_threads.hpp"

#include <oneapi/tbb/info.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <atomic>

#include "engine/run/tsan.hpp"

namespace stepgraph {
namespace {

// One slot stays empty: callers never enter the arena, they only enqueue work. TBB has at most as many workers as the
// machine has cores, and warns on stderr when asked for more.
int arena_size(int threads) { return std::max(2, std::min(threads, tbb::info::default_concurrency())); }

}  // namespace

struct HelperThreads::Impl {
  explicit Impl(int threads) : arena(arena_size(threads), /*reserved_for_masters=*/1) {}
  tbb::task_arena arena;
  std::atomic<int> under_way{0};  // enqueued and not yet done
};

HelperThreads::HelperThreads(int threads) : impl_(std::make_unique<Impl>(threads)) {}

// A helper that starts late still reads memory of its executor, so all of them are waited for.
HelperThreads::~HelperThreads() {
  for (int left; (left = impl_->under_way.load()) > 0;) impl_->under_way.wait(left);
  tsan::acquire(impl_.get());
}

void HelperThreads::enqueue(void (*work)(void*), void* argument) {
  Impl& impl = *impl_;
  impl.under_way.fetch_add(1);
  tsan::release(argument);
  tsan::enter_scheduler();
  impl.arena.enqueue([work, argument, &impl] {
    tsan::acquire(argument);
    work(argument);
    tsan::release(&impl);  // the memory it read may be freed once nothing is under way
    if (impl.under_way.fetch_sub(1) == 1) impl.under_way.notify_all();
  });
  tsan::leave_scheduler();
}

}  // namespace stepgraph
