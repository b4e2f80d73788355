#include "engine/graph/issue_order.hpp"

#include <algorithm>
#include <tuple>

#include "engine/base/error.hpp"
#include "engine/graph/graph_data.hpp"

namespace stepgraph {
namespace {

// By node: the nodes that the issue order puts directly before it. A queue is a rank, or a rank's use of one group. The
// parts of a queue form batches that share an issue position; each part follows the whole batch before its own.
std::vector<std::vector<std::uint32_t>> issued_before(const Graph& graph, IssueOrder order) {
  const GraphData& data = graph.data();
  std::vector<std::vector<std::uint32_t>> before(data.nodes.size());
  if (order == IssueOrder::any) return before;
  std::vector<std::uint32_t> parts = parts_in_issue_order(graph);
  const auto part                  = [&](std::uint32_t node) -> const PartRecord& {
    return data.parts[static_cast<std::size_t>(data.nodes[node].part)];
  };
  const auto queue = [&](std::uint32_t node) {
    return std::tuple(data.nodes[node].rank, order == IssueOrder::per_communicator ? part(node).group : 0);
  };
  if (order == IssueOrder::per_communicator)
    std::stable_sort(parts.begin(), parts.end(), [&](auto a, auto b) { return queue(a) < queue(b); });
  std::size_t last_batch = 0, batch = 0;  // where the batch before, and the current one, begin
  for (std::size_t i = 1; i < parts.size(); ++i) {
    if (queue(parts[i]) != queue(parts[i - 1])) {
      last_batch = batch = i;
      continue;
    }
    if (part(parts[i]).issue != part(parts[i - 1]).issue) {
      last_batch = batch;
      batch      = i;
    }
    for (std::size_t k = last_batch; k < batch; ++k) before[parts[i]].push_back(parts[k]);
  }
  return before;
}

// Adds edges to those of a graph, in a topological order of all of them, and drops those that lanes imply.
class EdgeMerger {
 public:
  EdgeMerger(const Graph& graph, std::vector<std::vector<std::uint32_t>> wanted)
      : graph_(graph), data_(graph.data()), own_(graph.edges()), wanted_(std::move(wanted)), clocks_(own_.clocks) {}

  Edges merge() {
    std::vector<std::vector<std::uint32_t>> preds(data_.nodes.size());
    for (const std::uint32_t node : sort()) preds[node] = preds_of(node);
    Edges out;
    out.loop_begin = own_.loop_begin;
    out.loop_preds = own_.loop_preds;
    out.clocks     = std::move(clocks_);
    out.pred_begin.push_back(0);
    for (const std::vector<std::uint32_t>& row : preds) {
      out.preds.insert(out.preds.end(), row.begin(), row.end());
      out.pred_begin.push_back(static_cast<std::uint32_t>(out.preds.size()));
    }
    return out;
  }

 private:
  [[nodiscard]] std::vector<std::uint32_t> sort() const {
    const std::size_t size = data_.nodes.size();
    std::vector<std::vector<std::uint32_t>> after(size);
    std::vector<std::uint32_t> waiting(size, 0), sorted;
    for (std::uint32_t node = 0; node < size; ++node) {
      for (const std::uint32_t before : own_.before({node})) after[before].push_back(node);
      for (const std::uint32_t before : wanted_[node]) after[before].push_back(node);
      waiting[node] = static_cast<std::uint32_t>(own_.before({node}).size() + wanted_[node].size());
      if (waiting[node] == 0) sorted.push_back(node);
    }
    for (std::size_t done = 0; done < sorted.size(); ++done) {
      for (const std::uint32_t next : after[sorted[done]]) {
        if (--waiting[next] == 0) sorted.push_back(next);
      }
    }
    if (sorted.size() == size) return sorted;
    const auto stuck = static_cast<std::uint32_t>(
        std::find_if(waiting.begin(), waiting.end(), [](std::uint32_t count) { return count > 0; }) - waiting.begin());
    throw Error(ErrorKind::graph,
                str("issue order: ", size - sorted.size(), " nodes wait for each other in a cycle, including ",
                    graph_.describe(Node{stuck}), " (verify prints the cycle)"));
  }

  std::vector<std::uint32_t> preds_of(std::uint32_t node) {
    const auto own = own_.before({node});
    std::vector<std::uint32_t> preds(own.begin(), own.end());
    LaneClock clock{};
    const auto follow = [&](std::uint32_t before) {
      if (clocks_.empty()) return;
      for (std::size_t lane = 0; lane < num_lane_kinds; ++lane)
        clock[lane] = std::max(clock[lane], clocks_[before][lane]);
    };
    for (const std::uint32_t before : own) follow(before);
    for (const std::uint32_t before : wanted_[node]) {
      const NodeRecord& record = data_.nodes[before];
      const bool implied       = record.lane >= 0 ? clock[static_cast<std::size_t>(record.lane)] > record.lane_position
                                                  : std::find(preds.begin(), preds.end(), before) != preds.end();
      if (implied) continue;
      preds.push_back(before);
      follow(before);
    }
    std::sort(preds.begin(), preds.end());
    if (!clocks_.empty()) {
      if (const std::int32_t lane = data_.nodes[node].lane; lane >= 0)
        clock[static_cast<std::size_t>(lane)] = data_.nodes[node].lane_position + 1;
      clocks_[node] = clock;
    }
    return preds;
  }

  const Graph& graph_;
  const GraphData& data_;
  const Edges& own_;
  std::vector<std::vector<std::uint32_t>> wanted_;  // by node
  std::vector<LaneClock> clocks_;                   // with the edges added so far; empty when the graph has no lanes
};

}  // namespace

std::vector<std::uint32_t> parts_in_issue_order(const Graph& graph) {
  const GraphData& data = graph.data();
  std::vector<std::uint32_t> parts(data.parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) parts[i] = data.parts[i].node;
  const auto key = [&](std::uint32_t node) {
    return std::tuple(data.nodes[node].rank, data.parts[static_cast<std::size_t>(data.nodes[node].part)].issue);
  };
  std::stable_sort(parts.begin(), parts.end(), [&](auto a, auto b) { return key(a) < key(b); });
  return parts;
}

Edges edges_in_issue_order(const Graph& graph, IssueOrder order) {
  if (order == IssueOrder::any || graph.data().parts.empty()) return graph.edges();
  return EdgeMerger(graph, issued_before(graph, order)).merge();
}

}  // namespace stepgraph
