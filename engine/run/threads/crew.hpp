#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "engine/run/threads/compute_permits.hpp"
#include "engine/run/threads/helper_threads.hpp"
#include "engine/run/threads/numa_places.hpp"
#include "engine/run/threads/tile_pieces.hpp"
#include "engine/run/threads/worker_calls.hpp"

namespace stepgraph {

// The threads that work on the tiles of kernels: the thread that runs the kernel, and one helper for each free permit.
// Helpers are called when a kernel begins. Where a permit becomes free later while tiles are left, one more is asked.
// So a thread that runs out of nodes works on the kernels of other threads. So does the thread of a kernel while it
// waits for its last helpers, unless these have seats: then it waits in TBB. A kernel has the threads of some NUMA
// nodes, and each share of its tiles begins on a thread of the same NUMA node in every run. For a program with one
// rank, and on several NUMA nodes, helpers are threads of TBB, which have seats in a kernel that is alone. Nodes of
// several ranks run side by side. Then helpers are the workers that have no node (WorkerCalls): with threads of TBB
// there would be more threads than processors, and the system would suspend threads that compute.
class Crew {
 public:
  Crew(const NumaPlaces& places, int num_workers, ComputePermits& permits, HelperThreads& threads);

  // Where kernels of the next run get helpers; null: from TBB. Called while no kernel runs.
  void set_helpers(WorkerCalls* calls) noexcept { calls_.store(calls); }

  // Calls tile for 0 to num_tiles - 1, each once, on threads of `range`, and returns when all are done. Throws the
  // first error. The caller holds a permit, and is on a node of `range`.
  void run(std::int64_t num_tiles, TileCall tile, const NumaRange& range);

  // To be called when a permit of a node has become free: asks a helper of the node, if tiles are left.
  void offer(int node) noexcept;

  // On a thread that was asked: works on the kernels of a node while it is not needed elsewhere. `preferred` is the
  // number of its permit among those of the node, if that one is free.
  void help(int node, int preferred) noexcept;

 private:
  // A range of tiles. Each thread begins with a share of its own, so that a kernel that runs again finds its memory in
  // the caches of the same cores. A thread whose share is done takes tiles of other shares.
  struct alignas(64) Share {
    std::atomic<std::int64_t> next{0};
    std::atomic<std::int64_t> end{0};
  };
  struct Job {
    std::atomic<bool> taken{false};
    std::atomic<bool> open{false};  // tiles may be left; `tile` is valid until there are no helpers
    std::atomic<int> helpers{0};    // threads that work on it without a seat
    std::atomic<int> seats{0};      // its own thread, and those that tbb::parallel_for was asked for
    std::vector<Share> shares;      // by thread of `range`; more than it has are empty
    std::atomic<NodeRange> nodes;   // of `range`; helpers read it before they join
    NumaRange range;
    int own_node = 0;  // of the thread that runs the kernel
    TileCall tile;
    TilePieces pieces;
    std::mutex mutex;  // guards the rest
    std::optional<Error> error;
  };

  struct Seats;

  [[nodiscard]] Job* take_job() noexcept;
  void share_out(Job& job, std::int64_t num_tiles, std::int64_t num_pieces) const noexcept;
  [[nodiscard]] int num_seats(const Job& job, std::int64_t num_pieces) const noexcept;
  [[nodiscard]] int first_share(const Job& job, int node) const noexcept;
  void call_helpers(Job& job, std::int64_t num_pieces) noexcept;
  void sit_down(Job& job, int seat, bool owner) noexcept;
  [[nodiscard]] int num_open(NodeRange nodes) const noexcept;
  [[nodiscard]] int num_expected(const NumaRange& range) const noexcept;
  // Until no tile is left; with `while_free`, also until the thread is needed elsewhere. Begins with a share, goes on
  // with the other shares of the node, and then with those of other nodes.
  void work(Job& job, int first, int node, bool while_free) noexcept;
  [[nodiscard]] bool needed_elsewhere(int node) const noexcept;
  void replace_helpers(int node) noexcept;
  [[nodiscard]] static bool compute_next(Job& job, Share& share, const TilePieces& pieces);
  template <class Work>
  static void guarded(Job& job, const Work& work) noexcept;
  static void fail(Job& job, Error error) noexcept;
  [[nodiscard]] bool help_another(const Job& own) noexcept;
  [[nodiscard]] Job* join_neediest(int node) noexcept;
  static void leave(Job& job) noexcept;
  [[nodiscard]] static bool is_open(const Job& job, int node) noexcept;  // to threads of the node
  [[nodiscard]] int share_of(const Job& job, int permit) const noexcept;
  [[nodiscard]] bool tiles_left(int node) const noexcept;
  [[nodiscard]] static bool tiles_left(const Job& job) noexcept;
  [[nodiscard]] static bool tiles_left(const Share& share) noexcept;

  const NumaPlaces& places_;
  ComputePermits& permits_;
  HelperThreads& threads_;
  std::atomic<WorkerCalls*> calls_{nullptr};
  std::vector<Job> jobs_;
  alignas(64) std::atomic<int> open_jobs_{0};
};

}  // namespace stepgraph
