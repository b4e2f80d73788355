#include "engine/run/helper_threads.hpp"

#include <oneapi/tbb/info.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <exception>

#include "engine/run/tsan.hpp"

namespace stepgraph {
namespace {

// One slot stays empty: callers never enter the arena, they only enqueue work. TBB has at most as many workers as the
// machine has cores, and warns on stderr when asked for more.
int arena_size(int threads) { return std::max(2, std::min(threads, tbb::info::default_concurrency())); }

// Shared with the enqueued work, which can start after the end of its HelperThreads: if TBB starts a thread late, or fails
// to start one and starts another one for something else.
struct Ongoing {
  std::atomic<int> running{0};
  std::atomic<bool> closed{false};  // what starts from here on does nothing
};

}  // namespace

struct HelperThreads::Impl {
  explicit Impl(int threads) : arena(arena_size(threads), /*reserved_for_masters=*/1) {}
  tbb::task_arena arena;
  std::shared_ptr<Ongoing> ongoing = std::make_shared<Ongoing>();
};

HelperThreads::HelperThreads(int threads) : impl_(std::make_unique<Impl>(threads)) {}

int HelperThreads::most(int threads) { return threads > 1 ? arena_size(threads) - 1 : 0; }

HelperThreads::~HelperThreads() {
  Ongoing& ongoing = *impl_->ongoing;
  ongoing.closed.store(true);
  for (int left; (left = ongoing.running.load()) > 0;) ongoing.running.wait(left);
  tsan::acquire(&ongoing);
}

bool HelperThreads::enqueue(void (*work)(void*), void* argument) noexcept {
  tsan::release(argument);
  tsan::enter_scheduler();
  bool enqueued = true;
  try {
    impl_->arena.enqueue([work, argument, ongoing = impl_->ongoing] {
      // Either the destructor sees that this runs, or this sees that it must not.
      ongoing->running.fetch_add(1);
      if (!ongoing->closed.load()) {
        tsan::acquire(argument);
        work(argument);
        tsan::release(ongoing.get());  // the memory it read may be freed once nothing runs
      }
      if (ongoing->running.fetch_sub(1) == 1) ongoing->running.notify_all();
    });
  } catch (const std::exception&) {  // TBB starts a thread when there is work for it, if it can
    enqueued = false;
  }
  tsan::leave_scheduler();
  return enqueued;
}

}  // namespace stepgraph
