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

// A graph lowered to a Taskflow for one world: one task per node; matched parts whose ranks live in this process are
// one task together. Lower once, run as often as you like. Shares the graph's storage and the memory; the world must
// outlive it. Cheap to copy; copies are the same program.
class Program {
 public:
  // Without `memory`: on zeroed memory of its own.
  Program(const RunnableGraph& graph, World& world, std::shared_ptr<Memory> memory = nullptr);
  // The same for RunnableGraph(graph, world): each buffer has bytes of its own.
  Program(const Graph& graph, World& world, std::shared_ptr<Memory> memory = nullptr);

  [[nodiscard]] Memory& memory() const noexcept;
  [[nodiscard]] std::size_t num_tasks() const noexcept;
  [[nodiscard]] std::size_t num_task_edges() const noexcept;
  [[nodiscard]] std::size_t num_waiting_lanes() const noexcept;
  // On a device, how long a thread was busy until all of the last run that has ended was enqueued; 0: nothing was.
  [[nodiscard]] double issue_s() const noexcept;

 private:
  friend class Executor;
  friend class Run;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

struct ExecutorOptions {
  // Bodies that compute at one moment, those inside parallel kernels included. 0: as many as the machine has cores.
  int threads = 0;
  // Workers beyond those, as many as Program::num_waiting_lanes: one for each lane on which the world waits, or that
  // has host nodes of a device's program.
  int waiting_lanes = 0;
  // How long a step may take; 0: as long as it wants. Looked at by whoever waits: get() or done().
  std::chrono::milliseconds step_timeout{0};
  // How long a stopped step may take to let go of the bodies that still run.
  std::chrono::milliseconds drain_timeout{5000};
};

// A step under way. get() waits for it and throws what stopped it: one Error that names node, rank, lane and cause. A
// body that outlasts the drain time-out is named in the error and left behind; it must not outlive what it refers to.
// A Run that is dropped without get() waits too, and its error is lost.
class Run {
 public:
  Run(Run&&) noexcept = default;
  Run& operator=(Run&& other) noexcept;
  ~Run();

  void get();
  void cancel(std::string_view why = "cancelled");  // from any thread; get() then throws
  [[nodiscard]] bool done();                        // never blocks; notices a time-out too

 private:
  friend class Executor;
  struct Impl;
  explicit Run(std::shared_ptr<Impl> impl);
  void drop() noexcept;
  std::shared_ptr<Impl> impl_;
};

// Threads that run programs: a tf::Executor for nodes, TBB threads for what is parallel inside them. One step at a
// time.
class Executor {
 public:
  explicit Executor(ExecutorOptions options = {});
  ~Executor();
  Executor(const Executor&)            = delete;
  Executor& operator=(const Executor&) = delete;

  // With a recorder, the step's times are there when it has ended: engine/run/recorder.hpp.
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
