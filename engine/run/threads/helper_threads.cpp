#include "engine/run/threads/helper_threads.hpp"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/info.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>
#include <oneapi/tbb/task_scheduler_observer.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "engine/run/threads/tsan.hpp"

namespace stepgraph {
namespace {

// One slot is left to callers. TBB has at most as many workers as the machine has cores, and warns on stderr when asked
// for more.
int arena_size(int threads) { return std::max(2, std::min(threads, tbb::info::default_concurrency())); }

// Of several nodes, all threads of one can help a caller of another.
int arena_size(const NumaPlaces& places, int node) {
  return arena_size(places.node(node).num_threads + (places.num_nodes() > 1 ? 1 : 0));
}

// Shared with the enqueued work. Work can start after the end of its HelperThreads: TBB may start its thread late. Or
// TBB could not start a thread, kept the work, and later starts a thread for other work.
struct Ongoing {
  std::atomic<int> queued{0}, running{0};
  std::atomic<bool> closed{false};  // work that starts from here on does nothing
};

// Counts one call as queued until it starts, or until it is destroyed and so never starts. TBB may have queued a call
// although `enqueue` threw. So the call itself owns its count, and the caller does not correct it.
class Queued {
 public:
  explicit Queued(std::shared_ptr<Ongoing> ongoing) : ongoing_(std::move(ongoing)) { ongoing_->queued.fetch_add(1); }
  Queued(Queued&& other) noexcept = default;
  ~Queued() {
    if (const auto unused = start()) tsan::release(unused.get());
  }
  // The call starts: it is no longer queued. TBB calls a const function object.
  std::shared_ptr<Ongoing> start() const noexcept {
    if (ongoing_) ongoing_->queued.fetch_sub(1);
    return std::exchange(ongoing_, nullptr);
  }

 private:
  mutable std::shared_ptr<Ongoing> ongoing_;
};

// Work that TBB has queued but never runs, because the process ends first, is never destroyed. A list that knows all
// states in use keeps that from being a leak. ThreadSanitizer does not see that the last owner of a shared pointer
// comes after the others, so owners tell it.
std::shared_ptr<Ongoing> make_ongoing() {
  // Constant initialisation: ThreadSanitizer does not see the guard of another one.
  static constinit std::mutex mutex;
  static constinit std::vector<std::shared_ptr<Ongoing>>* states = nullptr;  // never destroyed
  const auto destroy                                             = [](Ongoing* last) {
    tsan::acquire(last);
    delete last;
  };
  const std::lock_guard lock(mutex);
  if (states == nullptr) states = new std::vector<std::shared_ptr<Ongoing>>;
  std::vector<std::shared_ptr<Ongoing>>& known = *states;
  std::erase_if(known, [](const std::shared_ptr<Ongoing>& each) { return each.use_count() == 1; });
  return known.emplace_back(new Ongoing, destroy);
}

// Binds TBB's threads to a node while they are in its arena. Other threads are there too: they bind themselves. TBB
// starts its threads with the affinity of the process, also where the thread that starts them is bound. ThreadSanitizer
// does not see that observe() waits for calls.
class ArenaBinding : public tbb::task_scheduler_observer {
 public:
  ArenaBinding(tbb::task_arena& arena, const NumaPlaces& places, int node)
      : task_scheduler_observer(arena), places_(places), node_(node) {
    tsan::release(this);
    observe(true);
  }
  // TBB does not tell which threads leave the arena from here on, so these are let go now.
  ~ArenaBinding() override {
    observe(false);
    tsan::acquire(this);
    for (const pid_t thread : inside_) places_.unbound().apply_to(thread);
  }
  ArenaBinding(const ArenaBinding&)            = delete;
  ArenaBinding& operator=(const ArenaBinding&) = delete;

  void on_scheduler_entry(bool is_worker) override {
    if (!is_worker) return;
    tsan::acquire(this);
    places_.lend_thread(node_);
    {
      const std::lock_guard lock(mutex_);
      inside_.push_back(gettid());
    }
    tsan::release(this);
  }
  void on_scheduler_exit(bool is_worker) override {
    if (!is_worker) return;
    tsan::acquire(this);
    places_.return_thread();
    {
      const std::lock_guard lock(mutex_);
      std::erase(inside_, gettid());
    }
    tsan::release(this);
  }

 private:
  const NumaPlaces& places_;
  const int node_;
  std::mutex mutex_;  // guards the next one
  std::vector<pid_t> inside_;
};

// The threads of one NUMA node.
struct NodeThreads {
  NodeThreads(const NumaPlaces& places, int node) : arena(arena_size(places, node), /*reserved_for_masters=*/1) {
    if (!places.binds()) return;
    arena.initialize();
    binding = std::make_unique<ArenaBinding>(arena, places, node);
  }
  tbb::task_arena arena;
  std::unique_ptr<ArenaBinding> binding;
  std::shared_ptr<Ongoing> ongoing = make_ongoing();
};

}  // namespace

struct HelperThreads::Impl {
  explicit Impl(const NumaPlaces& places) {
    for (int node = 0; node < places.num_nodes(); ++node) nodes.push_back(std::make_unique<NodeThreads>(places, node));
  }
  [[nodiscard]] NodeThreads& node(int node) const { return *nodes[static_cast<std::size_t>(node)]; }

  std::vector<std::unique_ptr<NodeThreads>> nodes;
  bool has_workers = tbb::info::default_concurrency() > 1;
};

HelperThreads::HelperThreads(const NumaPlaces& places) : impl_(std::make_unique<Impl>(places)) {}

int HelperThreads::most(const NumaPlaces& places) {
  if (places.num_threads() < 2) return 0;
  if (!places.binds()) return arena_size(places.num_threads()) - 1;
  int sum = 0;
  for (int node = 0; node < places.num_nodes(); ++node) sum += arena_size(places, node) - 1;
  return std::min(sum, std::max(1, tbb::info::default_concurrency() - 1));
}

HelperThreads::~HelperThreads() {
  for (const auto& node : impl_->nodes) node->ongoing->closed.store(true);
  for (const auto& node : impl_->nodes) {
    Ongoing& ongoing = *node->ongoing;
    for (int left; (left = ongoing.running.load()) > 0;) ongoing.running.wait(left);
    tsan::acquire(&ongoing);
    tsan::release(&ongoing);
  }
}

int HelperThreads::num_queued(int node) const noexcept { return impl_->node(node).ongoing->queued.load(); }

bool HelperThreads::can_run() const noexcept { return impl_->has_workers; }

// Isolated: a thread that waits for the last call does not begin other work meanwhile, such as a kernel of another
// rank. A caller that found no free slot waits elsewhere, and may do so.
void HelperThreads::run(int node, Work work, void* argument, int count) noexcept {
  const auto call = [&](int begin, int end, std::thread::id owner) noexcept {
    const tsan::OutsideScheduler outside;
    tsan::acquire(argument);
    for (int i = begin; i < end; ++i) work(argument, i, std::this_thread::get_id() == owner);
    tsan::release(argument);
  };
  tsan::release(argument);
  tsan::enter_scheduler();
  try {
    impl_->node(node).arena.execute([&] {
      const std::thread::id owner = std::this_thread::get_id();
      const auto part = [&](const tbb::blocked_range<int>& range) { call(range.begin(), range.end(), owner); };
      tbb::this_task_arena::isolate(
          [&] { tbb::parallel_for(tbb::blocked_range<int>(0, count, 1), part, tbb::static_partitioner()); });
    });
  } catch (const std::exception&) {
    call(0, count, std::this_thread::get_id());  // TBB had no memory for its tasks
  }
  tsan::leave_scheduler();
  tsan::acquire(argument);
}

void HelperThreads::enqueue(int node, void (*work)(void*, int), void* argument, int most) noexcept {
  if (num_queued(node) >= most) return;
  tsan::release(argument);
  tsan::enter_scheduler();
  try {
    NodeThreads& threads = impl_->node(node);
    threads.arena.enqueue([work, argument, node, queued = Queued(threads.ongoing)] {
      const tsan::OutsideScheduler outside;
      const std::shared_ptr<Ongoing> ongoing = queued.start();
      // Either the destructor sees that this runs, or this sees that it must not.
      ongoing->running.fetch_add(1);
      if (!ongoing->closed.load()) {
        tsan::acquire(argument);
        work(argument, node);
      }
      tsan::release(ongoing.get());  // the memory it read may be freed once nothing runs
      if (ongoing->running.fetch_sub(1) == 1) ongoing->running.notify_all();
    });
  } catch (const std::exception&) {
    // TBB could not start a thread for it. The calling threads then compute alone.
  }
  tsan::leave_scheduler();
}

}  // namespace stepgraph
