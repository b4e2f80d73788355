#include "engine/look/op_times.hpp"

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/graph/matching.hpp"

namespace stepgraph {
namespace {

// The helpers and the part of the time that a running task has, integrated over time.
class Running {
 public:
  Running(std::span<const TaskTime> tasks, int num_workers) : num_workers_(num_workers) {
    std::vector<std::pair<double, int>> changes;
    for (const TaskTime& task : tasks) {
      changes.emplace_back(task.begin_s, 1);
      changes.emplace_back(task.end_s, -1);
    }
    std::sort(changes.begin(), changes.end());
    Mark now;
    for (const auto& [time_s, change] : changes) {
      now = later(now, time_s);
      now.count += change;
      if (!marks_.empty() && marks_.back().time_s == time_s) {
        marks_.back() = now;
      } else {
        marks_.push_back(now);
      }
    }
  }

  // Integrals up to a time.
  struct Mark {
    double time_s    = 0;
    double of_helped = 0;  // the share of the other workers that help a task
    double of_own    = 0;  // the part of the time that a task has
    int count        = 0;  // of tasks, from time_s on
  };

  [[nodiscard]] Mark up_to(double time_s) const {
    const auto after =
        std::upper_bound(marks_.begin(), marks_.end(), time_s, [](double t, const Mark& m) { return t < m.time_s; });
    return after == marks_.begin() ? Mark{.time_s = time_s} : later(*std::prev(after), time_s);
  }

 private:
  [[nodiscard]] Mark later(const Mark& mark, double time_s) const {
    const double seconds = time_s - mark.time_s;
    if (mark.count <= 0) return {time_s, mark.of_helped, mark.of_own, mark.count};
    const double helpers = std::max(0.0, static_cast<double>(num_workers_ - mark.count) / mark.count);
    const double helped  = num_workers_ > 1 ? helpers / (num_workers_ - 1) : 0;
    return {time_s, mark.of_helped + helped * seconds, mark.of_own + seconds / mark.count, mark.count};
  }

  int num_workers_;
  std::vector<Mark> marks_;
};

}  // namespace

std::vector<TaskTime> task_times(const Graph& graph, const Timeline& timeline, int num_workers) {
  if (timeline.nodes.size() != graph.num_nodes()) {
    throw Error(ErrorKind::config, str("timeline: it has ", timeline.nodes.size(), " nodes, but the graph has ",
                                       graph.num_nodes(), " (take the timeline of this graph)"));
  }
  const Matching matching = match_parts(graph);
  std::vector<std::uint32_t> task_of_meeting(matching.size(), Matching::none);
  std::vector<TaskTime> tasks;
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    const Node node{i};
    if (!timeline.nodes[i].ran()) continue;
    const std::uint32_t meeting = matching.of_node.empty() ? Matching::none : matching.of_node[i];
    const bool alone            = meeting == Matching::none;
    if (alone || task_of_meeting[meeting] == Matching::none) {
      if (!alone) task_of_meeting[meeting] = static_cast<std::uint32_t>(tasks.size());
      const Node first = alone ? node : Node{matching.meeting(meeting).front()};
      tasks.push_back({.node = first, .begin_s = timeline.nodes[i].begin_s, .end_s = timeline.nodes[i].end_s});
    }
    TaskTime& task = alone ? tasks.back() : tasks[task_of_meeting[meeting]];
    task.flops += graph.cost(node).flops;
    task.bytes_moved += alone ? graph.cost(node).bytes_moved : bytes_in_shared_memory(graph, node);
  }
  const Running running(tasks, num_workers);
  for (TaskTime& task : tasks) {
    const Running::Mark begin = running.up_to(task.begin_s), end = running.up_to(task.end_s);
    task.own_s = end.of_own - begin.of_own;
    if (task.seconds() > 0) task.helped_share = std::min(1.0, (end.of_helped - begin.of_helped) / task.seconds());
  }
  return tasks;
}

std::vector<OpTime> op_times(const Graph& graph, const Timeline& timeline) {
  std::map<std::pair<std::string_view, NodeKind>, OpTime> by_op;
  for (const TaskTime& task : task_times(graph, timeline, 1)) {
    const NodeKind kind       = graph.kind(task.node);
    const std::string_view op = graph.op(task.node).empty() ? to_string(kind) : graph.op(task.node);
    OpTime& all = by_op.try_emplace({op, kind}, OpTime{.op = std::string(op), .kind = kind}).first->second;
    ++all.num_tasks;
    all.seconds += task.seconds();
    all.own_s += task.own_s;
    all.flops += task.flops;
    all.bytes_moved += task.bytes_moved;
  }
  std::vector<OpTime> ops;
  for (auto& [key, op] : by_op) ops.push_back(std::move(op));
  std::stable_sort(ops.begin(), ops.end(), [](const OpTime& a, const OpTime& b) { return a.seconds > b.seconds; });
  return ops;
}

}  // namespace stepgraph
