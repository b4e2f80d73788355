#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/run/compute_permits.hpp"
#include "engine/run/context.hpp"
#include "engine/run/helper_threads.hpp"

namespace stepgraph {

// The threads that work on the tiles of kernels: the thread that runs the kernel, and one helper for each free permit.
// Helper threads are asked when a kernel begins, and whenever a permit becomes free while tiles are left. So a thread
// that runs out of nodes works on the kernels of other threads. Nothing is allocated while kernels run.
class Crew {
 public:
  Crew(int num_threads, int num_workers, ComputePermits& permits, HelperThreads& threads);

  // Calls tile for 0 to num_tiles - 1, each once, and returns when all are done. Throws the first error. The caller
  // holds a permit.
  void run(std::int64_t num_tiles, TileCall tile);

  // To be called when a permit has become free: asks a helper thread, if tiles are left.
  void offer() noexcept;

 private:
  // Each thread begins with a share of its own, so that a kernel that runs again finds its memory in the caches of the
  // same cores. A thread whose share is done takes tiles of other shares.
  struct alignas(64) Share {
    std::atomic<std::int64_t> next{0};
    std::atomic<std::int64_t> end{0};
  };
  struct Job {
    std::atomic<bool> taken{false};
    std::atomic<bool> open{false};  // tiles may be left; `tile` is valid until there are no helpers
    std::atomic<int> helpers{0};
    std::vector<Share> shares;
    TileCall tile;
    std::int64_t at_once = 1, num_tiles = 0;  // a share counts pieces of `at_once` tiles
    std::mutex mutex;                         // guards the rest
    std::optional<Error> error;
  };

  [[nodiscard]] Job* take_job() noexcept;
  [[nodiscard]] std::int64_t tiles_at_once(std::int64_t num_tiles, std::int64_t joined) const noexcept;
  // Until no tile is left; with `while_free`, also until a thread waits for a permit.
  static void work(Job& job, std::size_t first_share, const ComputePermits* while_free) noexcept;
  static void fail(Job& job, Error error) noexcept;
  void help() noexcept;
  [[nodiscard]] bool tiles_left() const noexcept;

  int num_threads_;
  ComputePermits& permits_;
  HelperThreads& threads_;
  std::vector<Job> jobs_;
  std::atomic<int> open_jobs_{0};
  std::atomic<int> lingering_{0};  // helpers that spin for the next kernel
};

}  // namespace stepgraph
