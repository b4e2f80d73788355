#include "engine/run/threads/crew.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

namespace stepgraph {
namespace {

// Tells the core that this is a loop that waits for another core.
void pause_core() noexcept {
#if defined(__aarch64__)
  asm volatile("isb");
#elif defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Spins until the condition holds, or the time is over.
template <class Condition>
void spin(std::chrono::microseconds most, const Condition& condition) noexcept {
  if (condition()) return;
  const auto end = std::chrono::steady_clock::now() + most;
  do {
    for (int i = 0; i < 32; ++i) {
      pause_core();
      if (condition()) return;
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
}

}  // namespace

// A kernel with a seat for each thread that TBB may send.
struct Crew::Seats {
  Crew& crew;
  Job& job;
};

Crew::Crew(const NumaPlaces& places, int num_workers, ComputePermits& permits, HelperThreads& threads)
    : places_(places), permits_(permits), threads_(threads), jobs_(static_cast<std::size_t>(num_workers)) {
  for (Job& job : jobs_) job.shares = std::vector<Share>(static_cast<std::size_t>(places.num_threads()));
}

// Null: no job is free, as can happen for a kernel inside a kernel. That one runs on its own thread alone.
Crew::Job* Crew::take_job() noexcept {
  for (Job& job : jobs_) {
    if (!job.taken.load(std::memory_order_relaxed) && !job.taken.exchange(true)) return &job;
  }
  return nullptr;
}

// Open kernels that have threads of these nodes.
int Crew::num_open(NodeRange nodes) const noexcept {
  if (places_.num_nodes() == 1) return open_jobs_.load(std::memory_order_relaxed);
  return static_cast<int>(std::count_if(jobs_.begin(), jobs_.end(), [&](const Job& job) {
    const NodeRange of = job.nodes.load();
    return job.open.load() && of.first < nodes.end() && nodes.first < of.end();
  }));
}

// How many threads a kernel that begins now is cut for. While other kernels run, it gets an equal part of the threads.
// If no permit is free, at least one other node runs, and the kernel begins alone. Helpers of other kernels can join at
// any time, so it is then cut for twice its part.
int Crew::num_expected(const NumaRange& range) const noexcept {
  const int others = num_open(range.nodes);
  if (permits_.some_free(range)) return std::max(std::min(2, range.num_threads), range.num_threads / (others + 1));
  const int part = range.num_threads / (std::max(1, others) + 1);
  return part > 1 ? std::min(range.num_threads, 2 * part) : 1;
}

// Shares consist of whole pieces. Of several nodes, each gets its part of the pieces, however few these are.
void Crew::share_out(Job& job, std::int64_t num_tiles, std::int64_t num_pieces) const noexcept {
  const std::int64_t num_threads = job.range.num_threads;
  const auto num_shares          = job.range.nodes.count > 1 ? num_threads : std::min(num_pieces, num_threads);
  const auto begin_of            = [&](std::int64_t i) {
    return std::min(num_tiles, num_pieces * std::min(i, num_shares) / num_shares * job.pieces.most);
  };
  for (std::int64_t i = 0; i < std::ssize(job.shares); ++i) {
    Share& share = job.shares[static_cast<std::size_t>(i)];
    share.end.store(begin_of(i + 1), std::memory_order_relaxed);
    share.next.store(begin_of(i), std::memory_order_relaxed);
  }
}

// The kernel's own thread and the free permits of its node; while other kernels run, no more than an equal part of all
// threads.
int Crew::num_seats(const Job& job, std::int64_t num_pieces) const noexcept {
  const NumaRange own = places_.node(job.own_node);
  const int others    = num_open({job.own_node, 1}) - 1;  // `job` is open
  const int fair      = others > 0 ? std::max(1, own.num_threads / (others + 1)) : own.num_threads;
  return static_cast<int>(std::min<std::int64_t>(num_pieces, std::min(1 + permits_.num_free(own), fair)));
}

// The share of the node's first thread.
int Crew::first_share(const Job& job, int node) const noexcept {
  return places_.node(node).first_thread - job.range.first_thread;
}

// TBB's threads of the kernel's own node get seats. Workers and threads of other nodes are asked one by one. While
// other kernels run, so are TBB's threads of its own node: they may have all slots of the arena, and a thread that
// enters it would wait for one with a permit in its hands.
void Crew::call_helpers(Job& job, std::int64_t num_pieces) noexcept {
  const int count   = num_seats(job, num_pieces);
  const bool seated = calls_.load() == nullptr && threads_.can_run() && num_open({job.own_node, 1}) == 1;
  job.seats.store(seated ? count : 1, std::memory_order_relaxed);
  for (int node = job.range.nodes.first; node < job.range.nodes.end(); ++node) {
    if (node == job.own_node) continue;
    for (int i = permits_.num_free(places_.node(node)); i > 0; --i) offer(node);
  }
  if (!seated) {
    for (int i = 1; i < count; ++i) offer(job.own_node);
  } else if (count > 1) {
    Seats seats{*this, job};
    const auto sit = [](void* of, int seat, bool owner) noexcept {
      static_cast<Seats*>(of)->crew.sit_down(static_cast<Seats*>(of)->job, seat, owner);
    };
    threads_.run(job.own_node, sit, &seats, count);
  }
}

void Crew::run(std::int64_t num_tiles, TileCall tile, const NumaRange& range) {
  if (num_tiles <= 0) return;
  const TilePieces pieces       = pieces_of(num_tiles, tile.joined, num_expected(range), range.num_threads);
  const std::int64_t num_pieces = (num_tiles + pieces.most - 1) / pieces.most;
  Job* const job                = num_pieces > 1 && range.num_threads > 1 ? take_job() : nullptr;
  if (job == nullptr) return tile(0, num_tiles);
  job->range = range;
  job->nodes.store(range.nodes, std::memory_order_relaxed);
  job->own_node = NumaPlaces::node_of_this_thread(range.nodes);
  job->tile     = tile;
  job->pieces   = pieces;
  share_out(*job, num_tiles, num_pieces);
  job->error.reset();
  job->open.store(true);
  open_jobs_.fetch_add(1);
  call_helpers(*job, num_pieces);
  work(*job, first_share(*job, job->own_node), job->own_node, /*while_free=*/false);
  job->open.store(false);
  open_jobs_.fetch_sub(1);
  while (job->helpers.load() > 0 && help_another(*job)) {
  }
  // Tiles take equally long, so the last helpers end soon: spinning is faster than falling asleep and being woken.
  spin(std::chrono::microseconds(50), [&] { return job->helpers.load() == 0; });
  for (int left; (left = job->helpers.load()) > 0;) job->helpers.wait(left);
  const std::optional<Error> error = std::exchange(job->error, std::nullopt);
  job->taken.store(false);
  if (error) throw *error;
}

void Crew::offer(int node) noexcept {
  if (!tiles_left(node)) return;
  if (WorkerCalls* const calls = calls_.load()) return calls->call(node);
  const auto help = [](void* of, int at) {
    Crew& crew = *static_cast<Crew*>(of);
    crew.help(at, crew.places_.node(at).num_threads - 1);
  };
  threads_.enqueue(node, help, this, places_.node(node).num_threads);
}

// For a kernel's own thread, between its tiles: a helper may have left because it was needed elsewhere, or a permit may
// have become free when no call was possible.
void Crew::replace_helpers(int node) noexcept {
  const WorkerCalls* const calls = calls_.load();
  if (calls != nullptr && calls->num_queued() == 0 && permits_.some_free(places_.node(node))) offer(node);
}

// For a helper, between its tiles. As long as a permit is free, a worker is free too, and takes the next node.
bool Crew::needed_elsewhere(int node) const noexcept {
  if (permits_.contended(node)) return true;
  const WorkerCalls* const calls = calls_.load();
  return calls != nullptr && calls->nodes_wait() && !permits_.some_free(places_.all());
}

// On a thread that TBB has sent. A thread that is not the owner needs a permit. If a node has taken it meanwhile, the
// thread returns.
void Crew::sit_down(Job& job, int seat, bool owner) noexcept {
  const int node = job.own_node, share = first_share(job, node) + seat;
  if (owner) return work(job, share, node, /*while_free=*/false);
  const int permit = permits_.contended(node) ? -1 : permits_.try_acquire(seat, places_.node(node));
  if (permit < 0) return;
  work(job, share, node, /*while_free=*/true);
  permits_.release(permit);
  if (open_jobs_.load() > 1) offer(node);  // to the other kernels
}

// Returns when a node is ready, even if permits are free: the worker then takes the node.
void Crew::help(int node, int preferred) noexcept {
  const NumaRange own            = places_.node(node);
  const WorkerCalls* const calls = calls_.load();
  while (tiles_left(node) && !permits_.contended(node) && !(calls != nullptr && calls->nodes_wait())) {
    const int permit = permits_.try_acquire(preferred, own);
    if (permit < 0) return;
    places_.bind_thread(node);
    preferred = permit - own.first_thread;
    if (permits_.some_free(own)) offer(node);  // one more
    if (Job* const job = join_neediest(node)) {
      work(*job, share_of(*job, permit), node, /*while_free=*/true);
      leave(*job);
    }
    permits_.release(permit);
  }
}

// On the thread of a kernel that waits for its last helpers: a small piece of another kernel. False: there is none.
bool Crew::help_another(const Job& own) noexcept {
  Job* const job = join_neediest(own.own_node);
  if (job == nullptr) return false;
  const int num_shares = job->range.num_threads, first = first_share(*job, own.own_node);
  bool computed = false;
  guarded(*job, [&] {
    for (int k = 0; k < num_shares && !computed; ++k) {
      Share& share = job->shares[static_cast<std::size_t>((first + k) % num_shares)];
      computed     = compute_next(*job, share, {1, std::max<std::int64_t>(1, job->pieces.most / 4)});
    }
  });
  leave(*job);
  return computed;
}

// The open kernel with the fewest threads among those with tiles left. The calling thread counts as its helper until it
// leaves. Null: there is none.
Crew::Job* Crew::join_neediest(int node) noexcept {
  Job* least          = nullptr;
  const auto num_busy = [](const Job& job) { return job.helpers.load() + job.seats.load(); };
  for (Job& job : jobs_) {
    if (is_open(job, node) && tiles_left(job) && (least == nullptr || num_busy(job) < num_busy(*least))) least = &job;
  }
  if (least == nullptr) return nullptr;
  least->helpers.fetch_add(1);
  // Checked again: either the kernel's own thread sees this helper, or this helper sees that the kernel is over.
  if (is_open(*least, node)) return least;
  leave(*least);
  return nullptr;
}

void Crew::leave(Job& job) noexcept {
  if (job.helpers.fetch_sub(1) == 1) job.helpers.notify_all();
}

// A helper begins with the share of its permit, and leaves that of the kernel's own thread to it.
int Crew::share_of(const Job& job, int permit) const noexcept {
  const int share = permit - job.range.first_thread;
  return share == first_share(job, job.own_node) && places_.node(job.own_node).num_threads > 1 ? share + 1 : share;
}

bool Crew::is_open(const Job& job, int node) noexcept { return job.open.load() && job.nodes.load().contains(node); }

bool Crew::tiles_left(const Share& share) noexcept { return share.next.load() < share.end.load(); }

bool Crew::tiles_left(const Job& job) noexcept {
  return std::any_of(job.shares.begin(), job.shares.end(), [](const Share& share) { return tiles_left(share); });
}

bool Crew::tiles_left(int node) const noexcept {
  if (open_jobs_.load() == 0) return false;
  return std::any_of(jobs_.begin(), jobs_.end(), [&](const Job& job) { return is_open(job, node) && tiles_left(job); });
}

// The next piece of a share. False: no tile is left in it.
bool Crew::compute_next(Job& job, Share& share, const TilePieces& pieces) {
  for (std::int64_t next = share.next.load(), left; (left = share.end.load() - next) > 0;) {
    const std::int64_t end = next + pieces.next(left);
    if (!share.next.compare_exchange_strong(next, end)) continue;
    job.tile(next, end);
    return true;
  }
  return false;
}

void Crew::work(Job& job, int first, int node, bool while_free) noexcept {
  const int num_shares = job.range.num_threads, begin = first_share(job, node);
  const int num_own = places_.node(node).num_threads;  // shares of the node
  guarded(job, [&] {
    for (int k = 0; k < num_shares; ++k) {
      const int number = k < num_own ? begin + (first - begin + k) % num_own : (begin + k) % num_shares;
      Share& share     = job.shares[static_cast<std::size_t>(number)];
      while (tiles_left(share)) {
        if (while_free) {
          if (needed_elsewhere(node)) return;
        } else {
          replace_helpers(node);
        }
        static_cast<void>(compute_next(job, share, job.pieces));
      }
    }
  });
}

// Tiles may throw. The first error is that of the kernel.
template <class Work>
void Crew::guarded(Job& job, const Work& work) noexcept {
  try {
    work();
  } catch (const Error& error) {
    fail(job, error);
  } catch (const std::exception& error) {
    fail(job, Error(ErrorKind::run, error.what()));
  } catch (...) {
    fail(job, Error(ErrorKind::run, "unknown exception"));
  }
}

void Crew::fail(Job& job, Error error) noexcept {
  for (Share& share : job.shares) share.next.store(share.end.load());
  const std::lock_guard lock(job.mutex);
  if (!job.error) job.error = std::move(error);
}

}  // namespace stepgraph
