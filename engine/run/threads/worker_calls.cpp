#include "engine/run/threads/worker_calls.hpp"

#include <taskflow/taskflow.hpp>
#include <utility>

#include "engine/run/program/running_program.hpp"
#include "engine/run/threads/tsan.hpp"

namespace stepgraph {
namespace {

constinit thread_local tf::Runtime* this_runtime    = nullptr;  // of the task that runs on this thread
constinit thread_local const tf::Worker* own_worker = nullptr;  // null: this thread is no worker

}  // namespace

CallingTask::CallingTask(tf::Runtime& runtime) noexcept { this_runtime = &runtime; }
CallingTask::~CallingTask() { this_runtime = nullptr; }

struct AnswerTasks::Answer {
  std::atomic<bool> taken{false};
  int node = 0;
  tf::Task task;
};

AnswerTasks::AnswerTasks(tf::Taskflow& taskflow, RunningProgram& program)
    : taskflow_(taskflow),
      program_(program),
      runs_no_successor_(std::make_unique<tf::Task>(taskflow.emplace([] { return -1; }))) {}
AnswerTasks::~AnswerTasks() = default;

void AnswerTasks::begin(WorkerCalls& calls, int num_threads) {
  calls_             = &calls;
  calls.tasks_       = this;
  calls.most_queued_ = num_threads;
  calls.sources_left_.store(num_sources_);
  // At most num_threads calls are queued, and at most num_threads are being answered.
  const std::int64_t most = 2 * std::int64_t{num_threads};
  answers_.reserve(static_cast<std::size_t>(most));
  while (std::ssize(answers_) < most) add_answer();
}

void AnswerTasks::add_answer() {
  auto answer = std::make_unique<Answer>();
  answer->task = taskflow_.emplace([this, to = answer.get()](tf::Runtime& runtime) {
    const CallingTask task(runtime);
    calls_->num_queued_.fetch_sub(1);
    program_.help(to->node);
    to->taken.store(false);
  });
  try {
    runs_no_successor_->precede(answer->task);
  } catch (...) {
    taskflow_.erase(answer->task);  // it would run without a call
    throw;
  }
  answers_.push_back(std::move(answer));
}

void AnswerTasks::source_begins() noexcept { calls_->sources_left_.fetch_sub(1); }

void WorkerCalls::add(tf::Worker& worker) noexcept {
  own_worker = &worker;
  workers_[worker.id()].store(&worker);
}

void WorkerCalls::call(int node) noexcept {
  if (this_runtime == nullptr || num_queued_.load() >= most_queued_) return;
  if (own_worker->queue_size() + 1 >= own_worker->queue_capacity()) return;
  const auto& answers = tasks_->answers_;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    AnswerTasks::Answer& answer = *answers[next_.fetch_add(1, std::memory_order_relaxed) % answers.size()];
    if (answer.taken.load(std::memory_order_relaxed) || answer.taken.exchange(true)) continue;
    answer.node = node;
    num_queued_.fetch_add(1);
    tsan::enter_scheduler();
    this_runtime->schedule(answer.task);
    tsan::leave_scheduler();
    return;
  }
}

// A ready node is in the queue of a worker or, if it follows no other, in that of the executor. Calls are in the queues
// too, so they are subtracted. A thread that is no worker may come so late that the workers have ended.
bool WorkerCalls::nodes_wait() const noexcept {
  if (own_worker == nullptr) return false;
  std::int64_t waiting = sources_left_.load() - num_queued_.load();
  for (const auto& each : workers_) {
    if (const tf::Worker* const worker = each.load()) waiting += static_cast<std::int64_t>(worker->queue_size());
  }
  return waiting > 0;
}

}  // namespace stepgraph
