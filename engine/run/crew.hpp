#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/run/arena.hpp"
#include "engine/run/context.hpp"
#include "engine/run/slots.hpp"

namespace stepgraph {

// Who works on the tiles of kernels: the thread that runs the kernel, and helpers for as many licences as are free.
// Threads of the arena are asked to help when a kernel begins and whenever a licence comes free while tiles are left,
// so that a thread that runs out of nodes works on those of others. Nothing is allocated while kernels run.
class Crew {
 public:
  Crew(int num_threads, int num_workers, Slots& slots, Arena& arena);

  // Calls tile for 0 to num_tiles - 1, each once, and returns when all are done. Throws the first error. The caller
  // holds a licence.
  void run(std::int64_t num_tiles, TileCall tile);

  // A licence came free: if there is something to help with, somebody is asked to.
  void offer() noexcept;

 private:
  // Each thread begins with a share of its own, so that a kernel that runs again finds its memory in the caches of the
  // same cores; who is done helps the others.
  struct alignas(64) Share {
    std::atomic<std::int64_t> next{0};
    std::atomic<std::int64_t> end{0};
  };
  struct Job {
    std::atomic<bool> taken{false};
    std::atomic<bool> open{false};  // tiles may be left; `tile` is there at least until nobody helps
    std::atomic<int> helpers{0};
    std::vector<Share> shares;
    TileCall tile;
    std::int64_t at_once = 1, num_tiles = 0;  // a share counts pieces of `at_once` tiles
    std::mutex mutex;                         // guards the rest
    std::optional<Error> error;
  };

  [[nodiscard]] Job* take_job() noexcept;
  // Until no tile is left; or, with `while_free`, somebody waits for a licence.
  static void work(Job& job, std::size_t first_share, const Slots* while_free) noexcept;
  static void fail(Job& job, Error error) noexcept;
  void help() noexcept;
  [[nodiscard]] bool tiles_left() const noexcept;

  int num_threads_;
  Slots& slots_;
  Arena& arena_;
  std::vector<Job> jobs_;
  std::atomic<int> open_jobs_{0};
  std::atomic<int> asked_{0};      // helpers that were asked and have not come yet
  std::atomic<int> lingering_{0};  // helpers that wait for the next kernel, awake
};

}  // namespace stepgraph
