#include "engine/look/op_times.hpp"

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/graph/matching.hpp"

namespace stepgraph {
namespace {

// The number of running tasks and its inverse, integrated over time.
class Running {
 public:
  explicit Running(std::span<const TaskTime> tasks) {
    std::vector<std::pair<double, int>> changes;
    for (const TaskTime& task : tasks) {
      changes.emplace_back(task.begin_s, 1);
      changes.emplace_back(task.end_s, -1);
    }
    std::sort(changes.begin(), changes.end());
    Mark now;
    for (const auto& [time_s, change] : changes) {
      now = now.at(time_s);
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
    double time_s     = 0;
    double of_count   = 0;
    double of_inverse = 0;  // over the times when a task runs
    int count         = 0;  // from time_s on
    [[nodiscard]] Mark at(double later_s) const {
      const double seconds = later_s - time_s;
      return {later_s, of_count + count * seconds, of_inverse + (count > 0 ? seconds / count : 0), count};
    }
  };

  [[nodiscard]] Mark up_to(double time_s) const {
    const auto after =
        std::upper_bound(marks_.begin(), marks_.end(), time_s, [](double t, const Mark& m) { return t < m.time_s; });
    return after == marks_.begin() ? Mark{.time_s = time_s} : std::prev(after)->at(time_s);
  }

 private:
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
  const Running running(tasks);
  for (TaskTime& task : tasks) {
    const Running::Mark begin = running.up_to(task.begin_s), end = running.up_to(task.end_s);
    task.own_s = end.of_inverse - begin.of_inverse;
    if (num_workers < 2 || task.seconds() <= 0) continue;
    const double mean = (end.of_count - begin.of_count) / task.seconds();
    task.others_share = std::clamp((mean - 1) / (num_workers - 1), 0.0, 1.0);
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
