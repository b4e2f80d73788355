#include "engine/plan/order.hpp"

#include <algorithm>
#include <queue>
#include <utility>

#include "engine/base/disjoint_sets.hpp"
#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/graph/graph_data.hpp"
#include "engine/graph/issue_order.hpp"
#include "engine/graph/matching.hpp"

namespace stepgraph {
namespace {

class Orderer {
 public:
  Orderer(const Graph& graph, const Timeline& timeline)
      : graph_(graph), data_(graph.data()), timeline_(timeline), sets_(data_.nodes.size()) {}

  std::vector<std::uint32_t> order() {
    const Matching matching = match_parts(graph_);
    for (std::size_t i = 0; i < matching.size(); ++i) {
      for (const std::uint32_t node : matching.meeting(i)) sets_.join(matching.meeting(i).front(), node);
    }
    order_issues();
    cluster_ = std::move(sets_).roots();
    collect_waits();
    return sort();
  }

 private:
  using Wait = std::pair<std::uint32_t, std::uint32_t>;  // (before, after): first nodes, later clusters

  void order_issues() {
    const std::vector<std::uint32_t> parts = parts_in_issue_order(graph_);
    for (std::size_t i = 1; i < parts.size(); ++i) {
      const Node before{parts[i - 1]}, after{parts[i]};
      if (graph_.rank(before) != graph_.rank(after)) continue;
      if (graph_.part(before).issue == graph_.part(after).issue) {
        sets_.join(before.id, after.id);
      } else {
        waits_.emplace_back(before.id, after.id);
      }
    }
  }

  void collect_waits() {
    for (auto& [before, after] : waits_) {
      before = cluster_[before];
      after  = cluster_[after];
    }
    const Edges& edges = graph_.edges();
    for (std::uint32_t node = 0; node < cluster_.size(); ++node) {
      for (const std::uint32_t before : edges.before({node})) waits_.emplace_back(cluster_[before], cluster_[node]);
    }
  }

  std::vector<std::uint32_t> sort() {
    const auto size = static_cast<std::uint32_t>(cluster_.size());
    std::vector<std::uint32_t> waiting(size, 0), begin(std::size_t{size} + 1, 0), targets(waits_.size());
    for (const auto& [before, after] : waits_) {
      ++waiting[after];
      ++begin[before + 1];
    }
    for (std::uint32_t i = 0; i < size; ++i) begin[i + 1] += begin[i];
    std::vector<std::uint32_t> next(begin.begin(), begin.end() - 1);
    for (const auto& [before, after] : waits_) targets[next[before]++] = after;

    // A cluster begins when its last node begins.
    std::vector<double> time(size, 0);
    for (std::uint32_t node = 0; node < size; ++node)
      time[cluster_[node]] = std::max(time[cluster_[node]], timeline_.nodes[node].begin_s);
    using Ready = std::pair<double, std::uint32_t>;
    std::priority_queue<Ready, std::vector<Ready>, std::greater<>> ready;
    std::uint32_t num_clusters = 0, turn = 0;
    for (std::uint32_t i = 0; i < size; ++i) {
      if (cluster_[i] != i) continue;
      ++num_clusters;
      if (waiting[i] == 0) ready.emplace(time[i], i);
    }
    std::vector<std::uint32_t> turn_of(size, 0);
    while (!ready.empty()) {
      const std::uint32_t done = ready.top().second;
      ready.pop();
      turn_of[done] = turn++;
      for (std::uint32_t i = begin[done]; i < begin[done + 1]; ++i) {
        if (--waiting[targets[i]] == 0) ready.emplace(time[targets[i]], targets[i]);
      }
    }
    if (turn != num_clusters) {
      std::uint32_t stuck = 0;
      while (waiting[cluster_[stuck]] == 0) ++stuck;
      throw Error(ErrorKind::graph, str("plan: ", num_clusters - turn,
                                        " communications and nodes wait for each other in a cycle, including ",
                                        graph_.describe(Node{stuck}), " (verify prints the cycle)"));
    }
    std::vector<std::uint32_t> out(size);
    for (std::uint32_t node = 0; node < size; ++node) out[node] = turn_of[cluster_[node]];
    return out;
  }

  const Graph& graph_;
  const GraphData& data_;
  const Timeline& timeline_;
  DisjointSets sets_;                   // nodes that can only happen at once
  std::vector<std::uint32_t> cluster_;  // by node: the node that stands for its set
  std::vector<Wait> waits_;
};

}  // namespace

std::vector<std::uint32_t> order_nodes(const Graph& graph, const Timeline& timeline) {
  return Orderer(graph, timeline).order();
}

}  // namespace stepgraph
