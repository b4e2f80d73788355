#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace tf {  // Taskflow stays in sources
class Runtime;
class Task;
class Taskflow;
class Worker;
}  // namespace tf

// How the workers of an executor help each other with kernels: internal to engine/. A call for help is a task of the
// run in progress, which a worker without a node takes. So help needs no threads beside the workers.
namespace stepgraph {

class RunningProgram;
class WorkerCalls;

// While it exists, the task that this thread runs can call for help.
class CallingTask {
 public:
  explicit CallingTask(tf::Runtime& runtime) noexcept;
  ~CallingTask();
  CallingTask(const CallingTask&)            = delete;
  CallingTask& operator=(const CallingTask&) = delete;
};

// The tasks of a program's taskflow that answer calls. They are made before a run, so a call allocates nothing. They
// follow a task that lets none of its successors run, so each runs only where a call puts it into the queue of the
// calling worker.
class AnswerTasks {
 public:
  AnswerTasks(tf::Taskflow& taskflow, RunningProgram& program);
  ~AnswerTasks();
  AnswerTasks(const AnswerTasks&)            = delete;
  AnswerTasks& operator=(const AnswerTasks&) = delete;

  void count_source() noexcept { ++num_sources_; }  // when tasks are made: one that follows no other
  void begin(WorkerCalls& calls, int num_threads);  // before a run
  void source_begins() noexcept;                    // in a run: one of the sources

 private:
  friend class WorkerCalls;
  struct Answer;

  void add_answer();

  tf::Taskflow& taskflow_;
  RunningProgram& program_;
  WorkerCalls* calls_ = nullptr;
  std::unique_ptr<tf::Task> runs_no_successor_;
  std::vector<std::unique_ptr<Answer>> answers_;
  std::int64_t num_sources_ = 0;
};

// The calls among the workers of one executor.
class WorkerCalls {
 public:
  explicit WorkerCalls(int num_workers) : workers_(static_cast<std::size_t>(num_workers)) {}
  void add(tf::Worker& worker) noexcept;  // on its thread, when that begins

  // Makes a worker call Crew::help for this NUMA node soon. Does nothing if the calling thread runs no task, if as many
  // calls are queued as there are threads, or if Taskflow would have to allocate memory.
  void call(int node) noexcept;
  [[nodiscard]] int num_queued() const noexcept { return num_queued_.load(); }  // calls that have not started

  // Whether nodes are ready that no worker has begun. Those that do not fit the queue of a worker, which has room for
  // 255, are not seen. On other threads than workers: false.
  [[nodiscard]] bool nodes_wait() const noexcept;

 private:
  friend class AnswerTasks;

  std::vector<std::atomic<const tf::Worker*>> workers_;  // by number; null: its thread has not begun
  AnswerTasks* tasks_ = nullptr;                         // of the program that runs; only its tasks use it
  int most_queued_    = 0;                               // the number of threads
  // Apart from the members above, which every helper reads between its tiles.
  alignas(64) std::atomic<std::size_t> next_{0};  // the answer that is tried first
  std::atomic<int> num_queued_{0};
  alignas(64) std::atomic<std::int64_t> sources_left_{0};
};

}  // namespace stepgraph
