#include "engine/run/executor.hpp"

#include <algorithm>
#include <mutex>
#include <optional>
#include <system_error>
#include <taskflow/taskflow.hpp>
#include <thread>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/run/program/device_bodies.hpp"
#include "engine/run/program/lowering.hpp"
#include "engine/run/program/recording.hpp"
#include "engine/run/program/running_program.hpp"
#include "engine/run/streams.hpp"
#include "engine/run/threads/thread_limit.hpp"
#include "engine/run/threads/tsan.hpp"
#include "engine/run/threads/waiting_lanes.hpp"
#include "engine/run/threads/worker_calls.hpp"

namespace stepgraph {
namespace {

using Clock = std::chrono::steady_clock;

// Makes each Taskflow worker one of the pool's workers.
class WorkerNaming : public tf::WorkerInterface {
 public:
  explicit WorkerNaming(Pool& pool) : pool_(pool) {}
  void scheduler_prologue(tf::Worker& worker) override {
    this_worker = &pool_.workers[worker.id()];
    pool_.calls.add(worker);
    if (pool_.places.binds()) pool_.places.return_thread();  // a body that made the executor can be bound
    tsan::enter_scheduler();
  }
  void scheduler_epilogue(tf::Worker&, std::exception_ptr) override { tsan::leave_scheduler(); }

 private:
  Pool& pool_;
};

std::shared_ptr<Memory> memory_for(const RunnableGraph& graph, World& world, const MakeStorage& make) {
  DeviceMemory* const device = world.device() != nullptr ? &world.device()->memory() : nullptr;
  return graph.memory() ? std::make_shared<Memory>(graph, *graph.memory(), device, make)
                        : std::make_shared<Memory>(graph, device, make);
}

}  // namespace

struct Program::Impl {
  // `nodes_in_order`: on a device, the order in which nodes are issued.
  Impl(const RunnableGraph& runnable, World& world, std::shared_ptr<Memory> memory, Lowering lowering,
       std::vector<std::uint32_t> nodes_in_order)
      : num_tasks(lowering.task_nodes.size()),
        waiting_lanes(std::move(lowering.waiting_lanes)),
        running(runnable.graph(), world, std::move(memory), std::move(lowering.matches),
                std::move(lowering.match_of_node), std::move(lowering.waits)),
        order(std::make_shared<const TaskOrder>(TaskOrder{std::move(lowering.leader), std::move(lowering.task_nodes),
                                                          std::move(lowering.pred_begin), std::move(lowering.preds)})) {
    const Graph& graph = runnable;
    for (std::uint32_t node = 0; node < graph.num_nodes() && !computes_inside; ++node) {
      computes_inside = graph.parallel({node}) || graph.has_part({node});
    }
    for (const std::uint32_t node : order->task_nodes) num_task_edges += order->preds_of(node).size();
    if (world.device() != nullptr) {
      use_device(runnable, world, std::move(nodes_in_order));
    } else {
      make_tasks(graph);
    }
    if constexpr (tsan::enabled) {
      running.task_preds.resize(graph.num_nodes());
      for (const std::uint32_t node : order->task_nodes) {
        const auto preds = order->preds_of(node);
        running.task_preds[node].assign(preds.begin(), preds.end());
      }
    }
  }

  // One Taskflow task for each task of the lowered graph. Nodes of several ranks run side by side: then workers help
  // each other with kernels.
  void make_tasks(const Graph& graph) {
    if (computes_inside && graph.ranks().size() > 1) answers = std::make_unique<AnswerTasks>(taskflow, running);
    std::vector<tf::Task> tasks(order->leader.size());
    for (const std::uint32_t node : order->task_nodes) {
      const auto invoke            = graph.body({node}).invoke();
      const TaskRecord* const task = &running.task(node);
      // Two pointers fit where std::function keeps small callables, inside Taskflow's own node. The third one of a
      // source is allocated, but few tasks are sources.
      if (!answers) {
        tasks[node] = taskflow.emplace([invoke, task] { RunningProgram::run(invoke, *task); });
      } else if (!order->preds_of(node).empty()) {
        tasks[node] = taskflow.emplace([invoke, task](tf::Runtime& runtime) {
          const CallingTask calling(runtime);
          RunningProgram::run(invoke, *task);
        });
      } else {
        answers->count_source();
        tasks[node] = taskflow.emplace([invoke, task, counted = answers.get()](tf::Runtime& runtime) {
          const CallingTask calling(runtime);
          counted->source_begins();
          RunningProgram::run(invoke, *task);
        });
      }
    }
    // A worker goes on with the last successor of a task, if it can run, and wakes others for the rest. A node that
    // waits is never the last where another one can run: the worker would leave its core, and a woken one might get it
    // late.
    for (const bool waits : {true, false}) {
      for (const std::uint32_t node : order->task_nodes) {
        if (running.waits(node) != waits) continue;
        for (const std::uint32_t before : order->preds_of(node)) tasks[before].precede(tasks[node]);
      }
    }
  }

  // On a device a run is one Taskflow task that issues all nodes, and one for each host lane.
  void use_device(const RunnableGraph& graph, World& world, std::vector<std::uint32_t> nodes_in_order) {
    check_device_bodies(graph, world);
    const WorkspaceNeeds needs = workspace_needs(world);
    StreamPlan plan            = plan_streams(graph, nodes_in_order, needs);
    verify_streams(graph, plan, needs);
    if (graph.memory() != nullptr) check_workspaces(*graph.memory(), plan);
    std::erase_if(nodes_in_order, [&](std::uint32_t node) { return order->leader[node] != node; });
    auto host_lanes = std::make_unique<HostLanes>(graph, nodes_in_order);
    waiting_lanes   = host_lanes->lanes();
    running.use_device(world.device()->lower(graph, std::move(plan)), std::move(nodes_in_order), std::move(host_lanes));
    taskflow.emplace([this] { running.issue(); });
    for (std::size_t lane = 0; lane < waiting_lanes.size(); ++lane)
      taskflow.emplace([this, lane] { running.run_host_lane(lane); });
  }

  std::size_t num_tasks, num_task_edges = 0;  // of the lowered graph
  std::vector<Lane> waiting_lanes;
  bool computes_inside = false;  // some body may call parallel_for
  std::atomic<bool> busy{false};
  RunningProgram running;
  std::shared_ptr<const TaskOrder> order;  // for recordings
  tf::Taskflow taskflow;
  std::unique_ptr<AnswerTasks> answers;  // null: workers never help each other with its kernels
};

Program::Program(const RunnableGraph& graph, World& world, std::shared_ptr<Memory> memory, const MakeStorage& make) {
  if (!memory) memory = memory_for(graph, world, make);
  memory->check_fits(graph, graph.memory());
  Lowering lowering = lower(graph, world);
  prepare_world(world, graph, lowering.matches);
  std::vector<std::uint32_t> nodes_in_order;
  if (world.device() != nullptr) nodes_in_order = issue_order(lowering, graph.memory());
  impl_ = std::make_shared<Impl>(graph, world, std::move(memory), std::move(lowering), std::move(nodes_in_order));
}

Program::Program(const Graph& graph, World& world, std::shared_ptr<Memory> memory, const MakeStorage& make)
    : Program(RunnableGraph(graph, world), world, std::move(memory), make) {}

Memory& Program::memory() const noexcept { return impl_->running.memory(); }
std::size_t Program::num_tasks() const noexcept { return impl_->num_tasks; }
std::size_t Program::num_task_edges() const noexcept { return impl_->num_task_edges; }
std::size_t Program::num_waiting_lanes() const noexcept { return impl_->waiting_lanes.size(); }
double Program::issue_s() const noexcept { return impl_->running.issue_s(); }

struct Run::Impl {
  Impl(std::shared_ptr<Program::Impl> what, std::shared_ptr<Pool> on, std::shared_ptr<Recording> writes_to,
       const ExecutorOptions& chosen)
      : pool(std::move(on)), recording(std::move(writes_to)), options(chosen), program_(std::move(what)) {
    if (options.step_timeout.count() > 0) deadline = Clock::now() + options.step_timeout;
  }

  // Null when the run is over: an idle executor keeps no program, memory or world alive.
  [[nodiscard]] std::shared_ptr<Program::Impl> held() {
    const std::lock_guard lock(state.mutex);
    return program_;
  }

  void stop(const std::string& why) {
    if (const auto what = held()) what->running.stop(state, Error(ErrorKind::run, why), /*name_running=*/true);
  }

  // Stops the run if its time is over, if no node ends any more, or if a peer has failed.
  void notice_trouble() {
    if (state.phase() != RunPhase::running && state.phase() != RunPhase::issued) return;
    const auto what = held();
    if (!what) return;
    if (const auto failure = what->running.world().failure()) {
      what->running.stop(state, Error(ErrorKind::backend, str("step: ", *failure)), /*name_running=*/true);
    } else if (deadline && Clock::now() >= *deadline) {
      stop(str("step: ran out of time after ", options.step_timeout.count(), " ms"));
    } else if (is_stalled(*what)) {
      stop(str("step: no node has ended for ", options.stall_timeout.count(), " ms"));
    }
  }

  // Compares the number of nodes that have ended with that of the last look. Between two looks this process can have
  // been suspended, so one look adds little to the time without progress.
  bool is_stalled(Program::Impl& what) {
    const std::lock_guard lock(progress_mutex_);
    const auto now = Clock::now();
    if (now < next_look_) return false;
    next_look_       = now + glance;
    const auto since = std::min<Clock::duration>(now - std::exchange(last_look_, now), most_between_looks);
    count_on_device(what);
    if (options.stall_timeout.count() == 0) return false;
    const std::uint64_t done = pool->nodes_done();
    const bool progress      = std::exchange(last_done_, done) != done || !can_count_;
    still_                   = progress ? Clock::duration(0) : still_ + since;
    return still_ >= options.stall_timeout;
  }

  // While tasks run, they count: the device does only what they have issued.
  void count_on_device(Program::Impl& what) {
    can_count_                  = true;
    DeviceStreams* const device = what.running.device();
    if (device == nullptr || !state.tasks_ended()) return;
    const std::lock_guard lock(state.mutex);
    if (!program_) return;  // it is over, and the device may have the next run
    try {
      const std::optional<std::uint64_t> done = device->num_done();
      can_count_                              = done.has_value();
      if (done) pool->num_done_on_device.store(*done, std::memory_order_relaxed);
    } catch (const Error&) {  // done() reports it
    }
  }

  // The nodes that run now; none when the run is over.
  [[nodiscard]] std::string running_nodes() {
    const auto what = held();
    return what ? what->running.running_nodes() : std::string();
  }

  // For an error: the nodes that run, or the lanes of a device that has not finished.
  [[nodiscard]] std::string unfinished_work() {
    const std::string nodes = running_nodes();
    const std::lock_guard lock(state.mutex);
    return nodes.empty() && !unfinished.empty() ? str("the device has not finished ", unfinished) : nodes;
  }

  // Until when the drain time-out after a stop lasts; none: the run was not stopped.
  [[nodiscard]] std::optional<Clock::time_point> drain_until() {
    const std::lock_guard lock(state.mutex);
    const auto stopped = state.stopped_at();
    return stopped ? std::optional(*stopped + options.drain_timeout) : std::nullopt;
  }

  enum class Progress : std::uint8_t { under_way, over, given_up };

  // Where the run is now. Lets go of a program whose run is over, and gives up a device that does not finish. Never
  // waits.
  Progress look() {
    const std::shared_ptr<Program::Impl> what = held();
    if (!what) return Progress::over;
    if (state.phase() == RunPhase::abandoned) return Progress::given_up;
    const auto until = drain_until();
    const bool late  = until && Clock::now() >= *until;
    if (!state.tasks_ended() || future.wait_for(std::chrono::seconds(0)) != std::future_status::ready)
      return late ? Progress::given_up : Progress::under_way;
    tsan::acquire(what->running.finished());
    DeviceStreams* const device = what->running.device();
    // Several threads can wait for one run. The first one that sees the device done releases the program, which may run
    // again at once. The device is then asked about the new run, so the other threads must not ask: each of them looks
    // at the phase first, with the mutex locked.
    const std::lock_guard lock(state.mutex);
    if (state.phase() == RunPhase::over) return Progress::over;
    if (state.phase() == RunPhase::abandoned) return Progress::given_up;
    if (device == nullptr || is_done(*device)) {
      release();
      return Progress::over;
    }
    // The device has the drain time-out for itself: a body may have used up that of the bodies.
    if (!until || Clock::now() < std::max(*until, state.tasks_ended_at() + options.drain_timeout))
      return Progress::under_way;
    abandon(*device);
    return Progress::given_up;
  }

  // Whether it is over; if so, nothing holds the program any more.
  bool ended() { return look() == Progress::over; }

  // Waits for the end, or for the drain time-out after a stop. True: nothing of the run goes on any more.
  // One future ends the wait in the usual case: a second signal would wake the caller while the worker still tidies up,
  // and the next run would start on another, colder core. A stop is rare, so this thread polls for it. It polls a
  // device more often, because the device gives no signal.
  bool wait() {
    constexpr std::chrono::microseconds glance_at_device{20};
    for (;;) {
      const auto what = held();
      if (!what) return true;
      if (!state.tasks_ended()) {
        Clock::time_point until = Clock::now() + glance;
        if (deadline && !state.draining()) until = std::min(until, *deadline);
        future.wait_until(until);
      } else if (what->running.device() == nullptr) {
        future.wait_for(glance);
      }
      const Progress now = look();
      if (now != Progress::under_way) return now == Progress::over;
      notice_trouble();
      if (state.tasks_ended()) std::this_thread::sleep_for(glance_at_device);
    }
  }

  // With the mutex locked. A device that has failed is done. After an abort by a peer, the work of communications ends
  // early: the device is done, and its results mean nothing.
  bool is_done(DeviceStreams& device) {
    try {
      if (!device.done()) return false;
      if (const auto failure = program_->running.world().failure())
        throw Error(ErrorKind::backend, str("step: ", *failure));
      if (recording) recording->set_times(device.times());
    } catch (const Error& error) {
      if (!state.error()) program_->running.abort(error.what());  // peers may wait for this rank
      state.fail(error);
    }
    return true;
  }

  // Lets go of the program, which may run again. With the mutex locked.
  void release() {
    state.release();
    if (recording) recording->end();
    program_->running.end();
    program_->busy.store(false);
    program_.reset();
  }

  // With the mutex locked. The device may still use what the program has, and keeps it. The program can never run
  // again: it stays busy.
  void abandon(DeviceStreams& device) {
    try {
      unfinished = lane_names(device.unfinished());
    } catch (const std::exception&) {  // the device has failed, and names no lanes
    }
    state.abandon();
    if (recording) recording->end();
    program_->running.end();
    device.abandon(program_);
  }

  std::shared_ptr<Pool> pool;            // its workers know the nodes that they run
  std::shared_ptr<Recording> recording;  // null: not recorded
  ExecutorOptions options;
  std::optional<Clock::time_point> deadline;
  tf::Future<void> future;
  RunState state;
  std::string unfinished;           // of an abandoned run: the lanes; guarded by the mutex of `state`
  std::atomic<bool> gotten{false};  // get() was called: it throws what stopped the run once

 private:
  static constexpr std::chrono::milliseconds glance{20};
  static constexpr std::chrono::seconds most_between_looks{1};

  std::shared_ptr<Program::Impl> program_;  // guarded by the mutex of `state`
  std::mutex progress_mutex_;               // guards the rest; locked before that of `state`
  std::uint64_t last_done_     = 0;
  Clock::time_point last_look_ = Clock::now(), next_look_ = last_look_ + glance;
  Clock::duration still_{0};  // without a node that ended
  bool can_count_ = true;     // the device can tell how many nodes are done
};

struct Executor::Impl {
  explicit Impl(const ExecutorOptions& chosen, NumaPlaces places, int num_workers)
      : options(chosen),
        pool(std::make_shared<Pool>(std::move(places), num_workers)),
        workers(static_cast<std::size_t>(num_workers), tf::make_worker_interface<WorkerNaming>(*pool)) {}

  ExecutorOptions options;
  std::shared_ptr<Pool> pool;
  std::mutex mutex;                    // guards `current`
  std::shared_ptr<Run::Impl> current;  // the last run; kept while its bodies may run
  tf::Executor workers;                // last: its threads end before the members that they use
};

Run::Run(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Run::~Run() { drop(); }

Run& Run::operator=(Run&& other) noexcept {
  if (this != &other) {
    drop();
    impl_ = std::move(other.impl_);
  }
  return *this;
}

void Run::drop() noexcept {
  if (impl_ && !impl_->gotten.load()) impl_->wait();
  impl_.reset();
}

void Run::get() {
  if (!impl_ || impl_->gotten.exchange(true)) {
    throw Error(ErrorKind::config, "run: get() was called before, or the run was moved away");
  }
  const bool drained = impl_->wait();
  std::optional<Error> error;
  std::string left;
  {
    const std::lock_guard lock(impl_->state.mutex);
    error = impl_->state.error();
    if (!impl_->unfinished.empty()) left = "these lanes of the device have not finished: " + impl_->unfinished;
  }
  if (!drained) {
    if (const std::string names = impl_->running_nodes(); !names.empty()) left = "these nodes still run: " + names;
    throw Error(error->kind(), str(error->what(), "; ", impl_->options.drain_timeout.count(), " ms later ",
                                   left.empty() ? "its work was still not done" : left));
  }
  if (error) throw *error;
}

void Run::cancel(std::string_view why) {
  if (impl_) impl_->stop(str("step: ", why));
}

bool Run::done() {
  if (!impl_) return true;
  impl_->notice_trouble();
  return impl_->look() != Impl::Progress::under_way;
}

Executor::Executor(ExecutorOptions options) {
  const auto check = [](int value, const char* what) {
    if (value >= 0 && value <= 4096) return;
    throw Error(ErrorKind::config, str("executor: ", what, " = ", value, " (0 to 4096)"));
  };
  check(options.threads, "threads");
  check(options.waiting_lanes, "waiting_lanes");
  const auto check_time = [](std::chrono::milliseconds time, const char* what) {
    if (time.count() >= 0) return;
    throw Error(ErrorKind::config, str("executor: ", what, " = ", time.count(), " ms (not negative)"));
  };
  check_time(options.step_timeout, "step_timeout");
  check_time(options.stall_timeout, "stall_timeout");
  check_time(options.drain_timeout, "drain_timeout");
  std::vector<NumaNode> nodes = chosen_numa_nodes();
  if (options.threads == 0)
    options.threads = nodes.empty() ? static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))
                                    : num_processors(nodes);
  const int num_workers = options.threads + options.waiting_lanes;
  NumaPlaces places(options.threads, std::move(nodes));
  check_threads(num_workers + HelperThreads::most(places));
  impl_ = std::make_shared<Impl>(options, std::move(places), num_workers);
}

Executor::~Executor() {
  std::shared_ptr<Run::Impl> last = impl_->current;
  if (!last) return;
  last->stop("step: its executor was destroyed");  // does nothing if it has ended
  if (last->wait()) return;
  if (last->state.phase() == RunPhase::abandoned) return;  // no thread works for it
  // A body does not return; get() has named it. Joining its thread would block the caller, so another thread waits. If
  // that one cannot be started, the caller waits after all.
  try {
    std::thread([pool = impl_, last]() mutable {
      last->future.wait();
      last.reset();
      pool.reset();
    }).detach();
  } catch (const std::system_error&) {
    last->future.wait();
  }
}

int Executor::threads() const noexcept { return impl_->options.threads; }
int Executor::waiting_lanes() const noexcept { return impl_->options.waiting_lanes; }

Run Executor::start(const Program& program, Recorder* recorder) {
  const std::shared_ptr<Program::Impl>& what = program.impl_;
  const ExecutorOptions& options             = impl_->options;
  if (std::ssize(what->waiting_lanes) > options.waiting_lanes) {
    throw Error(ErrorKind::config,
                str("executor: the program has ", what->waiting_lanes.size(), " lanes that wait (",
                    lane_names(what->waiting_lanes), "), but the pool has ", options.waiting_lanes,
                    " workers for them (set waiting_lanes to at least ", what->waiting_lanes.size(), ")"));
  }
  const std::lock_guard lock(impl_->mutex);
  if (impl_->current && !impl_->current->ended()) {
    throw Error(ErrorKind::config, str("executor: a step is still under way (", impl_->current->unfinished_work(),
                                       "); one executor runs one step at a time"));
  }
  if (what->busy.exchange(true)) {
    throw Error(ErrorKind::config, "executor: the program is under way on another executor (make a Program for each)");
  }
  Recording* const recording = recorder ? recorder->recording_.get() : nullptr;
  bool recorded = false, begun = false;
  try {
    auto run       = std::make_shared<Run::Impl>(what, impl_->pool, recorder ? recorder->recording_ : nullptr, options);
    impl_->current = run;
    if (recording) {
      recorded = recording->begin(impl_->pool->workers.size(), what->order);
      if (!recorded) throw Error(ErrorKind::config, "executor: the recorder has a step under way (use one for each)");
    }
    const bool is_on_device = what->running.device() != nullptr;
    // A worker that waits for a thread of its NUMA node cannot help on another one.
    const bool workers_help = what->answers && impl_->pool->places.num_nodes() == 1;
    if (what->answers) what->answers->begin(impl_->pool->calls, options.threads);
    impl_->pool->crew.set_helpers(workers_help ? &impl_->pool->calls : nullptr);
    what->running.begin(impl_->pool, run->state,
                        {.count_bodies = !is_on_device && (options.waiting_lanes > 0 || what->computes_inside),
                         .recording    = recording});
    begun = true;
    // The callback uses the run, which `current` keeps alive at least until Taskflow has called it.
    run->future = impl_->workers.run(what->taskflow, [state = &run->state] {
      const std::lock_guard state_lock(state->mutex);
      state->end_tasks();
    });
    return Run(run);
  } catch (...) {
    if (recorded) recording->abandon();
    if (begun) what->running.end();
    what->busy.store(false);
    impl_->current.reset();
    throw;
  }
}

}  // namespace stepgraph
