#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "engine/graph/timeline.hpp"

// The times that a run writes down: internal to engine/.
namespace stepgraph {

// The processor's own counter, which is the same on all cores; its unit is measured later. Reading it takes a tenth of
// the time that steady_clock takes.
#if defined(__aarch64__)
inline std::uint64_t read_ticks() noexcept {
  std::uint64_t ticks;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks)::"memory");
  return ticks;
}
// For the begin of a node. A processor can read the counter too early, so that a node seems to begin before the node it
// waited for has ended. On Neoverse V1 that happens once in millions of edges between workers. A barrier would cost 25
// to 100 ns a node, and the reading costs 3; so the timeline corrects such begins instead. (The end of a node needs no
// care: other threads see that the node has ended only after the counter was read.)
inline std::uint64_t read_begin_ticks() noexcept { return read_ticks(); }
#elif defined(__x86_64__)
inline std::uint64_t read_ticks() noexcept { return __builtin_ia32_rdtsc(); }
// Here processors read ahead all the time, so the barrier is needed.
inline std::uint64_t read_begin_ticks() noexcept {
  __builtin_ia32_lfence();
  return __builtin_ia32_rdtsc();
}
#else
inline std::uint64_t read_ticks() noexcept {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
inline std::uint64_t read_begin_ticks() noexcept { return read_ticks(); }
#endif

// The tasks of a program: the task in which each node runs, and the tasks before each task.
struct TaskOrder {
  std::vector<std::uint32_t> leader;      // the node whose task a node runs in
  std::vector<std::uint32_t> task_nodes;  // the leaders, ascending
  std::vector<std::uint32_t> pred_begin;  // by node, for leaders: predecessors, as leaders
  std::vector<std::uint32_t> preds;

  [[nodiscard]] std::span<const std::uint32_t> preds_of(std::uint32_t leading_node) const {
    return std::span(preds).subspan(pred_begin[leading_node], pred_begin[leading_node + 1] - pred_begin[leading_node]);
  }
};

// One moment, on both clocks.
struct Moment {
  std::uint64_t ticks                        = 0;
  std::chrono::steady_clock::time_point time = {};
  [[nodiscard]] static Moment now() noexcept { return {read_begin_ticks(), std::chrono::steady_clock::now()}; }
};

// Each worker appends to chunks of its own, so workers neither wait nor share memory. Chunks are kept from run to run.
// The executor calls begin() and end() around a run, the workers call add() in between.
class Recording {
 public:
  // Reserves the recorder for a run; false: another run has it.
  [[nodiscard]] bool begin(std::size_t num_workers, std::shared_ptr<const TaskOrder> order);
  void end() noexcept;      // of the run
  void abandon() noexcept;  // the run never began

  [[gnu::always_inline]] void add(int worker, std::uint32_t node, std::uint64_t begin, std::uint64_t end) noexcept {
    Log& log = logs_[static_cast<std::size_t>(worker)];
    if (log.next == log.end_of_chunk && !log.grow()) [[unlikely]]
      return;
    *log.next++ = {begin, end, node};
  }

  // Times that a device has measured: they replace what was added.
  void set_times(std::vector<NodeTime> times) { times_ = std::move(times); }

  [[nodiscard]] Timeline timeline() const;
  [[nodiscard]] std::chrono::steady_clock::time_point began() const { return began_.time; }

 private:
  static constexpr std::size_t chunk_size = 4096;

  struct Event {
    std::uint64_t begin, end;  // in ticks
    std::uint32_t node;
  };
  struct alignas(64) Log {
    Event* next         = nullptr;
    Event* end_of_chunk = nullptr;
    std::size_t used    = 0;  // chunks
    bool overflowed     = false;
    std::vector<std::unique_ptr<Event[]>> chunks;
    bool grow() noexcept;  // false: there is no memory
    void clear() noexcept;
    template <class Visit>
    void for_each(const Visit& visit) const;
  };

  [[nodiscard]] Moment ruler_end() const;
  void put_begins_right(Timeline& timeline) const;

  std::atomic<bool> busy_{false};
  bool recorded_ = false;
  std::vector<Log> logs_;        // by worker
  std::vector<NodeTime> times_;  // by node, where a device has measured them
  std::shared_ptr<const TaskOrder> order_;
  Moment began_;
  mutable std::mutex mutex_;  // guards `ended_` between runs
  mutable Moment ended_;      // or somewhat later: the speed of the counter is measured from `began_` to here
};

}  // namespace stepgraph
