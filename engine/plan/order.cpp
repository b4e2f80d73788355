#include "engine/plan/order.hpp"

#include <algorithm>
#include <numeric>
#include <queue>
#include <tuple>

#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/graph/graph_data.hpp"
#include "engine/graph/matching.hpp"

namespace stepgraph {
namespace {

class Orderer {
 public:
  Orderer(const Graph& graph, const Timeline& timeline)
      : graph_(graph), data_(graph.data()), timeline_(timeline), cluster_(data_.nodes.size()) {}

  std::vector<std::uint32_t> order() {
    std::iota(cluster_.begin(), cluster_.end(), 0u);
    const Matching matching = match_parts(graph_);
    for (std::size_t i = 0; i < matching.size(); ++i) {
      for (const std::uint32_t node : matching.meeting(i)) join(matching.meeting(i).front(), node);
    }
    order_issues();
    for (std::uint32_t node = 0; node < cluster_.size(); ++node) cluster_[node] = find(node);
    collect_waits();
    return sort();
  }

 private:
  using Wait = std::pair<std::uint32_t, std::uint32_t>;  // (before, after): first nodes, later clusters

  std::uint32_t find(std::uint32_t node) {
    while (cluster_[node] != node) node = cluster_[node] = cluster_[cluster_[node]];
    return node;
  }
  void join(std::uint32_t a, std::uint32_t b) { cluster_[find(a)] = find(b); }

  void order_issues() {
    std::vector<std::uint32_t> parts(data_.parts.size());
    std::iota(parts.begin(), parts.end(), 0u);
    const auto key = [&](std::uint32_t part) {
      return std::tuple(data_.nodes[data_.parts[part].node].rank, data_.parts[part].issue);
    };
    std::stable_sort(parts.begin(), parts.end(), [&](auto a, auto b) { return key(a) < key(b); });
    for (std::size_t i = 1; i < parts.size(); ++i) {
      const std::uint32_t before = data_.parts[parts[i - 1]].node, after = data_.parts[parts[i]].node;
      if (data_.nodes[before].rank != data_.nodes[after].rank) continue;
      if (key(parts[i - 1]) == key(parts[i])) {
        join(before, after);
      } else {
        waits_.emplace_back(before, after);
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
    std::uint32_t num_clusters = 0, position = 0;
    for (std::uint32_t i = 0; i < size; ++i) {
      if (cluster_[i] != i) continue;
      ++num_clusters;
      if (waiting[i] == 0) ready.emplace(time[i], i);
    }
    std::vector<std::uint32_t> position_of(size, 0);
    while (!ready.empty()) {
      const std::uint32_t done = ready.top().second;
      ready.pop();
      position_of[done] = position++;
      for (std::uint32_t i = begin[done]; i < begin[done + 1]; ++i) {
        if (--waiting[targets[i]] == 0) ready.emplace(time[targets[i]], targets[i]);
      }
    }
    if (position != num_clusters) {
      std::uint32_t stuck = 0;
      while (waiting[cluster_[stuck]] == 0) ++stuck;
      throw Error(ErrorKind::graph,
                  str("plan: ", num_clusters - position, " communications and nodes wait for each other in a circle, ",
                      graph_.describe(Node{stuck}), " among them (verify prints the cycle)"));
    }
    std::vector<std::uint32_t> out(size);
    for (std::uint32_t node = 0; node < size; ++node) out[node] = position_of[cluster_[node]];
    return out;
  }

  const Graph& graph_;
  const GraphData& data_;
  const Timeline& timeline_;
  std::vector<std::uint32_t> cluster_;  // by node; first a union-find forest, then the root of each tree
  std::vector<Wait> waits_;
};

}  // namespace

std::vector<std::uint32_t> order_nodes(const Graph& graph, const Timeline& timeline) {
  return Orderer(graph, timeline).order();
}

}  // namespace stepgraph
