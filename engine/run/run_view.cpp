#include "engine/run/run_view.hpp"

#include <algorithm>
#include <utility>

#include "engine/run/program/running_program.hpp"

namespace stepgraph {

RunView::RunView(Graph graph, std::shared_ptr<Pool> pool) : graph_(std::move(graph)), pool_(std::move(pool)) {}
RunView::~RunView() = default;

std::uint64_t RunView::nodes_done() const noexcept { return pool_->nodes_done(); }

std::vector<RunView::Running> RunView::running() const {
  std::vector<Running> found;
  for (Worker& worker : pool_->workers) {
    const std::uint32_t node = worker.running.load(std::memory_order_relaxed);
    if (node >= graph_.num_nodes()) continue;
    Running now{.node = Node{node}};
    if (const int rank = worker.context.waits_for_.load(std::memory_order_relaxed); rank >= 0)
      now.waits_for = Rank{rank};
    const std::lock_guard lock(worker.mutex);
    now.waiting_for = worker.waiting_for;
    found.push_back(std::move(now));
  }
  return found;
}

int RunView::num_computing() const noexcept {
  int count = 0;
  for (const Worker& worker : pool_->workers) {
    count += worker.running.load(std::memory_order_relaxed) < graph_.num_nodes() &&
             worker.context.waits_for_.load(std::memory_order_relaxed) < 0 &&
             !worker.said_waiting.load(std::memory_order_relaxed);
  }
  return count;
}

std::vector<RunView::Ended> RunView::last_nodes() const {
  const Moment now = Moment::now(), began = pool_->began();
  const double seconds_per_tick = std::chrono::duration<double>(now.time - began.time).count() /
                                  static_cast<double>(std::max<std::uint64_t>(1, now.ticks - began.ticks));
  std::vector<Ended> found;
  for (const Worker& worker : pool_->workers) {
    for (const NodeLog::Entry& entry : worker.log->entries()) {
      if (entry.node >= graph_.num_nodes()) continue;
      const std::uint64_t ago = now.ticks > entry.ticks ? now.ticks - entry.ticks : 0;
      found.push_back({Node{entry.node}, static_cast<double>(ago) * seconds_per_tick});
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const Ended& a, const Ended& b) { return a.ago_s > b.ago_s; });
  return found;
}

}  // namespace stepgraph
