#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/graph/graph_data.hpp"
#include "engine/run/context.hpp"
#include "engine/run/device.hpp"
#include "engine/run/memory.hpp"
#include "engine/run/program/node_log.hpp"
#include "engine/run/program/recording.hpp"
#include "engine/run/run_view.hpp"
#include "engine/run/threads/compute_permits.hpp"
#include "engine/run/threads/crew.hpp"
#include "engine/run/threads/helper_threads.hpp"
#include "engine/run/threads/host_lanes.hpp"
#include "engine/run/threads/numa_places.hpp"
#include "engine/run/threads/worker_calls.hpp"
#include "engine/run/world.hpp"

// How a node runs when Taskflow has scheduled it: internal to engine/. Includes no Taskflow, so that ThreadSanitizer
// can watch it (engine/run/threads/tsan.hpp).
namespace stepgraph {

class RunningProgram;

// One task of a lowered graph: a node, or the node that leads a match.
struct TaskRecord {
  void* closure;  // the body's
  std::uint32_t node;
};

// One thread of an executor's pool, and the node that it runs.
struct alignas(64) Worker {
  Context context;  // the node and the program that it runs
  int index = 0;
  std::atomic<bool> said_waiting{false};  // the current node has reported to wait; written by its own thread only
  bool has_permit = false;                // used by its own thread only: it may compute
  std::mutex mutex;                       // guards `waiting_for`
  std::string waiting_for;                // what the current node has reported to wait for
  void forget_waiting();

  // In worlds with peers, for RunView: the node that it runs, and those that it has run last.
  std::atomic<std::uint32_t> running{no_node};
  std::unique_ptr<NodeLog> log = std::make_unique<NodeLog>();
};

// The threads of an executor, which one run at a time uses.
struct Pool {
  explicit Pool(NumaPlaces places, int num_workers);

  void begin_run();  // before its first node
  [[nodiscard]] std::uint64_t nodes_done() const noexcept;
  [[nodiscard]] Moment began() const;  // the run

  NumaPlaces places;
  ComputePermits permits;
  Crew crew;
  WorkerCalls calls;
  HelperThreads threads;  // after the members that its threads read: the destructor waits for them
  std::vector<Worker> workers;
  std::atomic<std::uint64_t> num_done_on_device{0};  // written by threads that wait for the run

 private:
  mutable std::mutex mutex_;  // guards the next one
  Moment began_;
};

// Matched parts: by member; for a message the sender, then the receiver. A task runs one match, or the matches of a
// batch, which are neighbours.
struct Match {
  std::uint32_t batch_size   = 1;  // of the first match of a task
  std::uint32_t communicator = 0;  // as World::prepare has numbered it
  std::uint32_t turn         = 0;
  std::vector<LocalPart> parts;
  std::vector<Piece> pieces;  // what the parts' spans point at
};

// How far a run has come.
enum class RunPhase : std::uint8_t {
  running,    // bodies run
  stopping,   // it failed, was cancelled or ran out of time: no new body starts, bodies in flight drain
  issued,     // all tasks have ended; on a device, what they enqueued may still run
  stopped,    // the same, after a stop or a failure of the device
  abandoned,  // the device has not finished in time after a stop: the engine does not wait any more
  over,       // nothing of it runs any more, and its program may run again
};

// One run of a program: its phase, and why it failed.
//
//   running --stop--> stopping
//      |                  |
//   end_tasks          end_tasks
//      v                  v
//   issued --fail----> stopped --abandon--> abandoned
//      |                  |
//    release           release
//      `------> over <----'
//
// issued to stopped: the device failed, or the run was stopped while the device worked.
//
// Transitions are made with `mutex` locked; any thread may read the phase.
class RunState {
 public:
  [[nodiscard]] RunPhase phase() const noexcept { return phase_.load(); }
  // Asked for every node while tasks run: whether new bodies may no longer start.
  [[nodiscard]] bool stopping() const noexcept { return phase_.load(std::memory_order_relaxed) != RunPhase::running; }
  [[nodiscard]] bool tasks_ended() const noexcept { return phase() >= RunPhase::issued; }
  // It was stopped or has failed, and is not over yet.
  [[nodiscard]] bool draining() const noexcept { return phase() == RunPhase::stopping || phase() == RunPhase::stopped; }
  [[nodiscard]] const std::optional<Error>& error() const noexcept { return error_; }  // with `mutex` locked
  // When it was stopped; with `mutex` locked.
  [[nodiscard]] std::optional<std::chrono::steady_clock::time_point> stopped_at() const noexcept { return stopped_at_; }

  // When the last body had ended; with `mutex` locked, after end_tasks().
  [[nodiscard]] std::chrono::steady_clock::time_point tasks_ended_at() const noexcept { return tasks_ended_at_; }

  void stop(Error why);  // from running
  void end_tasks();      // from running or stopping
  void fail(Error why);  // from issued or stopped: the first reason is kept
  void abandon();        // from stopped
  void release();        // from issued or stopped

  std::mutex mutex;

 private:
  std::atomic<RunPhase> phase_{RunPhase::running};
  std::optional<Error> error_;
  std::optional<std::chrono::steady_clock::time_point> stopped_at_;
  std::chrono::steady_clock::time_point tasks_ended_at_;
};

// What a run needs beside running bodies.
struct RunNeeds {
  bool count_bodies    = false;    // more threads could run bodies than may compute at once
  Recording* recording = nullptr;  // where times go, if anywhere
  bool watched         = false;    // the world has peers, which want to know how far the run has come
};

// A lowered program that is or can be running: its nodes, their memory, and the run in progress. run() and the
// functions that bodies call happen on threads of the pool.
class RunningProgram {
 public:
  RunningProgram(Graph graph, World& world, std::shared_ptr<Memory> memory, std::vector<Match> matches,
                 std::vector<std::uint32_t> match_of_node, std::vector<bool> waits);

  // From here on bodies enqueue their work on the device, in this order; host nodes of lanes run on their own threads.
  void use_device(std::unique_ptr<DeviceStreams> device, std::vector<std::uint32_t> tasks_in_order,
                  std::unique_ptr<HostLanes> host_lanes);
  [[nodiscard]] DeviceStreams* device() const noexcept { return device_.get(); }
  void issue() noexcept;                                              // all of a run, on this thread
  [[nodiscard]] double issue_s() const noexcept { return issue_s_; }  // how long the last one took
  void run_host_lane(std::size_t lane) noexcept;                      // all nodes of the lane, on this thread

  void begin(const std::shared_ptr<Pool>& pool, RunState& run, RunNeeds needs);  // readies it for a run on `pool`
  void end() noexcept;  // of a run: nothing of it goes on any more, or it is abandoned

  // Executes a task on the thread of its worker: a body, or (without `invoke`) the communication that the node leads.
  // Does nothing once the run is stopping.
  static void run(Body::Invoke invoke, const TaskRecord& task) noexcept;
  void help(int node) noexcept;  // Crew::help, on the thread of a worker
  [[nodiscard]] const TaskRecord& task(std::uint32_t node) const { return tasks_[node]; }
  [[nodiscard]] bool waits(std::uint32_t node) const { return !waits_.empty() && waits_[node]; }  // for other ranks

  // Stops a run, also while a device works on what was issued; the first reason is kept. With `name_running` the nodes
  // that run at this moment are added to it.
  void stop(RunState& run, const Error& why, bool name_running);
  [[nodiscard]] bool stopping() const noexcept { return run_->stopping(); }
  [[nodiscard]] std::string running_nodes()
      const;  // names of the nodes that run now and what they wait for; may be empty

  [[nodiscard]] const Graph& graph() const noexcept { return graph_; }
  [[nodiscard]] const World& world() const noexcept { return world_; }
  void abort(std::string_view why) noexcept { world_.abort(why); }  // of the world: this process cannot go on
  [[nodiscard]] Memory& memory() const noexcept { return *memory_; }
  void parallel_for(Node node, std::int64_t num_tiles, TileCall tile);
  void waiting_for(std::string_view what);

  // Only used with ThreadSanitizer: the tasks before each task.
  std::vector<std::vector<std::uint32_t>> task_preds;  // by leading node
  [[nodiscard]] const void* finished() const noexcept { return &finished_; }

 private:
  static void execute(Body::Invoke invoke, const TaskRecord& task, Worker& worker) noexcept;
  static void fail_current() noexcept;
  void run_needy(Body::Invoke invoke, const TaskRecord& task, Worker& worker) noexcept;
  void run_on_device(Body::Invoke invoke, const TaskRecord& task, Worker& worker) noexcept;
  void issue_nodes();
  void wait_for_host(std::uint32_t node) noexcept;
  template <class Ready>
  [[nodiscard]] bool poll(const Ready& ready) const;
  static void leave_node(Worker& worker, std::uint32_t node, std::uint64_t end) noexcept;
  [[nodiscard]] bool device_is_done() const noexcept;  // with the mutex of the run locked
  void find_places(const std::shared_ptr<Pool>& pool);
  [[nodiscard]] const NumaRange& place(std::uint32_t node) const;
  void bind(Match& match);
  [[nodiscard]] std::span<Match> batch_of(std::uint32_t node);
  void communicate(const Context& context);

  Graph graph_;
  World& world_;
  std::shared_ptr<Memory> memory_;
  const GraphData& data_;
  std::vector<TaskRecord> tasks_;  // by node
  std::vector<Match> matches_;
  std::vector<Exchange> exchanges_;           // by match
  std::vector<std::uint32_t> match_of_node_;  // the first match of its task; empty when there are no parts
  std::vector<bool> waits_;                   // by node; empty when no lane waits

  std::unique_ptr<DeviceStreams> device_;
  std::vector<std::uint32_t> tasks_in_order_;  // of a device's program
  std::unique_ptr<HostLanes> host_lanes_;      // likewise
  double issue_s_ = 0;

  RunState* run_  = nullptr;
  Pool* pool_     = nullptr;
  RunNeeds needs_ = {};
  std::vector<NumaRange> places_;  // by node: the threads that compute for it; empty: all threads do
  std::weak_ptr<Pool> placed_on_;  // the pool of `places_`
  bool needy_ = false;             // `needs_` has some
  std::vector<char> done_;         // addresses for ThreadSanitizer, one per node
  char finished_ = 0;
};

// The worker of this thread: set by the threads of an executor, null on other threads, and on a worker's thread while
// it helps with a kernel. It is read for every node, so it is a plain variable with the cheapest TLS model.
extern constinit thread_local Worker* this_worker __attribute__((tls_model("initial-exec")));

}  // namespace stepgraph
