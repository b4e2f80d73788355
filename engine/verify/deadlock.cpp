#include <algorithm>
#include <map>

#include "engine/base/disjoint_sets.hpp"
#include "engine/base/error.hpp"
#include "engine/verify/findings.hpp"

namespace stepgraph::verifier {
namespace {

// Why one node waits for another.
enum class Wait : std::uint8_t { edge, communicator, issue };

struct WaitEdge {
  std::uint32_t from, to;  // `to` waits for `from`
  Wait why;
};

// The wait-for graph. Nodes that must run at the same time form one cluster: matched parts, and parts of one rank with
// the same issue position.
class WaitGraph {
 public:
  WaitGraph(const Graph& graph, const Edges& edges) : graph_(graph), sets_(graph.num_nodes()) {
    for (const auto& nodes : meetings(graph)) {
      for (const std::uint32_t node : nodes) sets_.join(nodes.front(), node);
    }
    for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
      for (const std::uint32_t before : edges.before({node})) waits_.push_back({before, node, Wait::edge});
    }
    order_issues();
  }

  void report_cycle(Findings& findings) {
    cluster_           = std::move(sets_).roots();
    const auto blocked = blocked_clusters();
    if (blocked.empty()) return;
    findings.add(Flaw::deadlock, describe_cycle(blocked));
  }

 private:
  // By rank, then by issue position. Sorted here, and not by the code that makes edges of this order.
  [[nodiscard]] std::vector<std::uint32_t> parts_by_issue() const {
    std::vector<std::uint32_t> parts;
    for (std::uint32_t node = 0; node < graph_.num_nodes(); ++node) {
      if (graph_.has_part({node})) parts.push_back(node);
    }
    std::stable_sort(parts.begin(), parts.end(), [&](std::uint32_t a, std::uint32_t b) {
      if (graph_.rank({a}) != graph_.rank({b})) return graph_.rank({a}) < graph_.rank({b});
      return graph_.part({a}).issue < graph_.part({b}).issue;
    });
    return parts;
  }

  // A part waits for the previous part that its rank issues, and for the previous part on the same communicator.
  void order_issues() {
    const std::vector<std::uint32_t> parts = parts_by_issue();
    std::map<std::uint32_t, std::uint32_t> last_on_group;  // of the current rank
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const bool first_of_rank = i == 0 || graph_.rank({parts[i - 1]}) != graph_.rank({parts[i]});
      if (first_of_rank) last_on_group.clear();
      const Graph::PartView part  = graph_.part({parts[i]});
      const auto [last, is_first] = last_on_group.try_emplace(part.group.id, parts[i]);
      if (!is_first) {
        if (graph_.part({last->second}).issue != part.issue)
          waits_.push_back({last->second, parts[i], Wait::communicator});
        last->second = parts[i];
      }
      if (first_of_rank) continue;
      if (graph_.part({parts[i - 1]}).issue == part.issue) {
        sets_.join(parts[i - 1], parts[i]);
      } else {
        waits_.push_back({parts[i - 1], parts[i], Wait::issue});
      }
    }
  }

  // Clusters that can never run: what remains after every cluster that can run is removed, repeatedly. Empty if none
  // remain.
  std::vector<bool> blocked_clusters() const {
    const std::size_t size = cluster_.size();
    std::vector<std::uint32_t> waiting(size, 0), begin(size + 1, 0), targets(waits_.size());
    for (const WaitEdge& wait : waits_) {
      ++waiting[cluster_[wait.to]];
      ++begin[cluster_[wait.from] + 1];
    }
    for (std::size_t i = 0; i < size; ++i) begin[i + 1] += begin[i];
    std::vector<std::uint32_t> next(begin.begin(), begin.end() - 1), ready;
    for (const WaitEdge& wait : waits_) targets[next[cluster_[wait.from]]++] = cluster_[wait.to];
    std::size_t left = 0;
    for (std::uint32_t i = 0; i < size; ++i) {
      if (cluster_[i] != i) continue;
      ++left;
      if (waiting[i] == 0) ready.push_back(i);
    }
    while (!ready.empty()) {
      const std::uint32_t done = ready.back();
      ready.pop_back();
      --left;
      for (std::uint32_t i = begin[done]; i < begin[done + 1]; ++i) {
        if (--waiting[targets[i]] == 0) ready.push_back(targets[i]);
      }
    }
    std::vector<bool> blocked;
    if (left == 0) return blocked;
    blocked.resize(size);
    for (std::uint32_t i = 0; i < size; ++i) blocked[i] = cluster_[i] == i && waiting[i] > 0;
    return blocked;
  }

  // Walks back along waits from a blocked cluster until it visits a cluster a second time.
  std::string describe_cycle(const std::vector<bool>& blocked) const {
    std::vector<std::uint32_t> wait_of(cluster_.size(), none);  // one wait between blocked clusters
    for (std::uint32_t i = 0; i < waits_.size(); ++i) {
      if (blocked[cluster_[waits_[i].from]] && blocked[cluster_[waits_[i].to]]) wait_of[cluster_[waits_[i].to]] = i;
    }
    std::uint32_t at = static_cast<std::uint32_t>(std::find(blocked.begin(), blocked.end(), true) - blocked.begin());
    std::vector<std::uint32_t> path, place(cluster_.size(), none);
    while (place[at] == none) {
      place[at] = static_cast<std::uint32_t>(path.size());
      path.push_back(wait_of[at]);
      at = cluster_[waits_[wait_of[at]].from];
    }
    path.erase(path.begin(), path.begin() + place[at]);

    std::string text = "these nodes wait for each other:";
    for (std::size_t i = 0; i < path.size(); ++i) {
      const WaitEdge& wait = waits_[path[i]];
      text +=
          str("\n    ", graph_.describe(Node{wait.to}), " waits for ", graph_.describe(Node{wait.from}), reason(wait));
      const std::uint32_t next = waits_[path[(i + 1) % path.size()]].to;  // the same cluster as wait.from
      if (next != wait.from)
        text += str("\n    ", graph_.describe(Node{wait.from}), " runs together with ", graph_.describe(Node{next}));
    }
    return text;
  }

  std::string reason(const WaitEdge& wait) const {
    if (wait.why == Wait::issue) {
      return str(" (issued before it: ", graph_.part({wait.from}).issue, " < ", graph_.part({wait.to}).issue, ")");
    }
    if (wait.why == Wait::communicator)
      return str(" (before it on group '", graph_.spec(graph_.part({wait.to}).group).name, "')");
    const bool lane = graph_.lane(Node{wait.from}) && graph_.lane(Node{wait.from}) == graph_.lane(Node{wait.to});
    return lane ? " (before it on their lane)" : " (an edge)";
  }

  static constexpr std::uint32_t none = ~std::uint32_t{0};
  const Graph& graph_;
  DisjointSets sets_;                   // nodes that can only happen at once
  std::vector<std::uint32_t> cluster_;  // by node: the node that stands for its set
  std::vector<WaitEdge> waits_;
};

}  // namespace

void check_deadlock(const Graph& graph, const Edges& edges, Findings& findings) {
  bool has_parts = false;
  for (std::uint32_t node = 0; node < graph.num_nodes() && !has_parts; ++node) has_parts = graph.has_part({node});
  if (has_parts) WaitGraph(graph, edges).report_cycle(findings);
}

}  // namespace stepgraph::verifier
