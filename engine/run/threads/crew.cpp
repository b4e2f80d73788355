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

Crew::Crew(int num_threads, int num_workers, ComputePermits& permits, HelperThreads& threads)
    : num_threads_(num_threads), permits_(permits), threads_(threads), jobs_(static_cast<std::size_t>(num_workers)) {
  for (Job& job : jobs_) job.shares = std::vector<Share>(static_cast<std::size_t>(num_threads));
}

// Null: no job is free, as can happen for a kernel inside a kernel. That one runs on its own thread alone.
Crew::Job* Crew::take_job() noexcept {
  for (Job& job : jobs_) {
    if (!job.taken.load(std::memory_order_relaxed) && !job.taken.exchange(true)) return &job;
  }
  return nullptr;
}

// Equal parts of a thread's share, of at most `joined` tiles. While all threads have work of their own, helpers are
// unlikely to come, and a thread computes twice as many in one call.
std::int64_t Crew::tiles_at_once(std::int64_t num_tiles, std::int64_t joined) const noexcept {
  if (joined < 1) return 1;
  if (!permits_.some_free()) return 2 * joined;
  const std::int64_t share = (num_tiles + num_threads_ - 1) / num_threads_, calls = (share + joined - 1) / joined;
  return (share + calls - 1) / calls;
}

// The kernel's own thread and the free permits; while other kernels run, no more than an equal part of all threads.
int Crew::num_seats(std::int64_t num_shares) const noexcept {
  const int others = open_jobs_.load(std::memory_order_relaxed) - 1;
  const int fair   = others > 0 ? std::max(1, num_threads_ / (others + 1)) : num_threads_;
  return static_cast<int>(std::min<std::int64_t>(num_shares, std::min(1 + permits_.num_free(), fair)));
}

void Crew::run(std::int64_t num_tiles, TileCall tile) {
  if (num_tiles <= 0) return;
  const std::int64_t at_once = tiles_at_once(num_tiles, tile.joined), num_pieces = (num_tiles + at_once - 1) / at_once;
  Job* const job = num_pieces > 1 && num_threads_ > 1 ? take_job() : nullptr;
  if (job == nullptr) return tile(0, num_tiles);
  const auto num_shares = std::min<std::int64_t>(num_pieces, num_threads_);
  for (std::int64_t i = 0; i < num_threads_; ++i) {
    Share& share = job->shares[static_cast<std::size_t>(i)];
    share.end.store(num_pieces * std::min(i + 1, num_shares) / num_shares, std::memory_order_relaxed);
    share.next.store(num_pieces * std::min(i, num_shares) / num_shares, std::memory_order_relaxed);
  }
  job->tile      = tile;
  job->at_once   = at_once;
  job->num_tiles = num_tiles;
  job->error.reset();
  job->open.store(true);
  open_jobs_.fetch_add(1);
  const int count = num_seats(num_shares);
  job->seats.store(count, std::memory_order_relaxed);
  if (count > 1 && !threads_.can_run()) {
    for (int i = 1; i < count; ++i) offer();
  } else if (count > 1) {
    Seats seats{*this, *job};
    const auto sit = [](void* of, int seat, bool owner) noexcept {
      static_cast<Seats*>(of)->crew.sit_down(static_cast<Seats*>(of)->job, seat, owner);
    };
    threads_.run(sit, &seats, count);
  }
  work(*job, 0, nullptr);
  job->open.store(false);
  open_jobs_.fetch_sub(1);
  // Tiles take equally long, so the last helpers end soon: spinning is faster than falling asleep and being woken.
  spin(std::chrono::microseconds(50), [&] { return job->helpers.load() == 0; });
  for (int left; (left = job->helpers.load()) > 0;) job->helpers.wait(left);
  const std::optional<Error> error = std::exchange(job->error, std::nullopt);
  job->taken.store(false);
  if (error) throw *error;
}

void Crew::offer() noexcept {
  if (tiles_left()) threads_.enqueue([](void* crew) { static_cast<Crew*>(crew)->help(); }, this, num_threads_);
}

// On a thread that TBB has sent. A thread that is not the owner needs a permit. If a node has taken it meanwhile, the
// thread returns.
void Crew::sit_down(Job& job, int seat, bool owner) noexcept {
  if (owner) return work(job, static_cast<std::size_t>(seat), nullptr);
  const int permit = permits_.contended() ? -1 : permits_.try_acquire(seat);
  if (permit < 0) return;
  work(job, static_cast<std::size_t>(seat), &permits_);
  permits_.release(permit);
  if (open_jobs_.load() > 1) offer();  // to the other kernels
}

// On a thread that was asked while kernels ran. It works on the kernel with the fewest threads.
void Crew::help() noexcept {
  int permit = num_threads_ - 1;
  while (tiles_left() && !permits_.contended()) {
    permit = permits_.try_acquire(permit);
    if (permit < 0) return;
    if (permits_.some_free()) offer();  // one more
    Job* least          = nullptr;
    const auto num_busy = [](const Job& job) { return job.helpers.load() + job.seats.load(); };
    for (Job& job : jobs_) {
      if (job.open.load() && tiles_left(job) && (least == nullptr || num_busy(job) < num_busy(*least))) least = &job;
    }
    if (least != nullptr) {
      least->helpers.fetch_add(1);
      // Checked again: either the kernel's own thread sees this helper, or this helper sees that the kernel is over.
      if (least->open.load()) work(*least, static_cast<std::size_t>(std::max(permit, 1)), &permits_);
      if (least->helpers.fetch_sub(1) == 1) least->helpers.notify_all();
    }
    permits_.release(permit);
  }
}

bool Crew::tiles_left(const Job& job) noexcept {
  return std::any_of(job.shares.begin(), job.shares.end(),
                     [](const Share& share) { return share.next.load() < share.end.load(); });
}

bool Crew::tiles_left() const noexcept {
  if (open_jobs_.load() == 0) return false;
  return std::any_of(jobs_.begin(), jobs_.end(), [](const Job& job) { return job.open.load() && tiles_left(job); });
}

void Crew::work(Job& job, std::size_t first_share, const ComputePermits* while_free) noexcept {
  try {
    for (std::size_t k = 0; k < job.shares.size(); ++k) {
      Share& share = job.shares[(first_share + k) % job.shares.size()];
      for (std::int64_t i; (i = share.next.load()) < share.end.load();) {
        if (while_free != nullptr && while_free->contended()) return;
        if ((i = share.next.fetch_add(1)) < share.end.load())
          job.tile(i * job.at_once, std::min((i + 1) * job.at_once, job.num_tiles));
      }
    }
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
