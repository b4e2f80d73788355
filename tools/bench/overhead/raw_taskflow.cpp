#include "tools/bench/overhead/raw_taskflow.hpp"

#include <taskflow/taskflow.hpp>
#include <vector>

namespace stepgraph::bench {

struct RawTaskflow::Tasks {
  tf::Taskflow taskflow;
};
struct RawExecutor::Workers {
  explicit Workers(int threads) : executor(static_cast<std::size_t>(threads)) {}
  tf::Executor executor;
};

RawTaskflow::RawTaskflow() : tasks_(std::make_unique<Tasks>()) {}
RawTaskflow::~RawTaskflow() = default;

void RawTaskflow::build(const Shape& shape) {
  std::vector<tf::Task> tasks(shape.num_nodes);
  for (tf::Task& task : tasks) task = tasks_->taskflow.emplace([] {});
  for (const auto& [before, after] : shape.edges) tasks[before].precede(tasks[after]);
}

RawExecutor::RawExecutor(int threads) : workers_(std::make_unique<Workers>(threads)) {}
RawExecutor::~RawExecutor() = default;

void RawExecutor::run(RawTaskflow& taskflow) { workers_->executor.run(taskflow.tasks_->taskflow).wait(); }

}  // namespace stepgraph::bench
