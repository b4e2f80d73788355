#pragma once
#include <chrono>
#include <cstddef>
#include <memory>
#include <string_view>

#include "engine/graph/graph.hpp"
#include "engine/run/memory.hpp"
#include "engine/run/recorder.hpp"
#include "engine/run/runnable_graph.hpp"
#include "engine/run/world.hpp"

namespace stepgraph {

// A graph lowered to a Taskflow for one world: one task per node. Matched parts whose ranks live in this process are
// one task together. Lower once, run many times. Shares the graph's storage and the memory; the world must outlive it.
// Cheap to copy; copies are the same program.
class Program {
 public:
  // Without `memory`: on zeroed memory of its own. `make` then makes the storage of buffers on disk.
  Program(const RunnableGraph& graph, World& world, std::shared_ptr<Memory> memory = nullptr,
          const MakeStorage& make = {});
  // The same for RunnableGraph(graph, world): each buffer has bytes of its own.
  Program(const Graph& graph, World& world, std::shared_ptr<Memory> memory = nullptr, const MakeStorage& make = {});

  [[nodiscard]] Memory& memory() const noexcept;
  [[nodiscard]] std::size_t num_tasks() const noexcept;
  [[nodiscard]] std::size_t num_task_edges() const noexcept;
  [[nodiscard]] std::size_t num_waiting_lanes() const noexcept;
  // On a device: how long a thread took to enqueue the last run that has ended; 0: nothing was enqueued.
  [[nodiscard]] double issue_s() const noexcept;

 private:
  friend class Executor;
  friend class Run;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

struct ExecutorOptions {
  // Threads that compute at one moment, helpers of parallel kernels included. 0: as many as the machine has cores.
  int threads = 0;
  // Workers beyond those, as many as Program::num_waiting_lanes: one for each lane on which the world waits. On a
  // device: one for each lane with host nodes.
  int waiting_lanes = 0;
  // How long a step may take; 0: no limit. Checked by the thread that calls get() or done().
  std::chrono::milliseconds step_timeout{0};
  // How long a step may go on without any node that ends; 0: no limit. A slow step is fine, one that hangs is stopped.
  // Checked as the step's time-out is. Between two checks at most a second counts: a process that was suspended, as by
  // Ctrl-Z or a debugger, goes on.
  std::chrono::milliseconds stall_timeout{0};
  // How long bodies may go on after their step was stopped, and then a device after the last body has ended.
  std::chrono::milliseconds drain_timeout{5000};
};

// A run of a program that was started. get() waits for its end and throws the error that stopped it: one Error that
// names node, rank, lane and cause. The error also names bodies that still run after the drain time-out; their threads
// are left behind, so what they refer to must stay alive. It names the lanes of a device that has not finished by then:
// the device keeps the program and its memory for the life of the process, and can run nothing more.
// The destructor of a Run without get() waits too, and its error is lost.
class Run {
 public:
  Run(Run&&) noexcept = default;
  Run& operator=(Run&& other) noexcept;
  ~Run();

  void get();
  void cancel(std::string_view why = "cancelled");  // from any thread; get() then throws
  // Whether get() would return at once. Never waits; notices time-outs too.
  [[nodiscard]] bool done();

 private:
  friend class Executor;
  struct Impl;
  explicit Run(std::shared_ptr<Impl> impl);
  void drop() noexcept;
  std::shared_ptr<Impl> impl_;
};

// Threads that run programs: a tf::Executor for nodes. TBB's threads help with parallel kernels; in a program of
// several ranks on one NUMA node, threads of the tf::Executor that have no node do. One run at a time. If a body
// outlasts the drain time-out, the executor keeps the program until a start() after the body has returned, which calls
// World::end_step of that program's world: so this world must live until then.
class Executor {
 public:
  // Throws Error(config) for options out of range, Error(backend) if the process may not start so many threads.
  explicit Executor(ExecutorOptions options = {});
  ~Executor();
  Executor(const Executor&)            = delete;
  Executor& operator=(const Executor&) = delete;

  // A recorder has the times of the run when it has ended: engine/run/recorder.hpp.
  [[nodiscard]] Run start(const Program& program, Recorder* recorder = nullptr);
  void run(const Program& program, Recorder* recorder = nullptr) { start(program, recorder).get(); }
  void run(const Graph& graph, World& world, Recorder* recorder = nullptr) { run(Program(graph, world), recorder); }

  [[nodiscard]] int threads() const noexcept;
  [[nodiscard]] int waiting_lanes() const noexcept;

 private:
  friend class Run;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace stepgraph
