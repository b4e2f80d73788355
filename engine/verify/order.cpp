#include "engine/verify/order.hpp"

#include <algorithm>

#include "engine/base/error.hpp"

namespace stepgraph::verifier {

Order::Order(const Graph& graph, const Edges& edges, Findings& findings)
    : graph_(graph), edges_(edges), findings_(findings), direct_stamp_(graph.num_nodes(), 0) {
  lane_.resize(graph.num_nodes());
  position_.resize(graph.num_nodes());
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    const auto lane = graph.lane(Node{node});
    lane_[node]     = lane ? static_cast<std::int8_t>(lane->kind) : std::int8_t{-1};
    position_[node] = graph.lane_position({node});
    has_lanes_ |= lane.has_value();
  }
  acyclic_ = sort();
  if (!acyclic_ || !has_lanes_) return;
  count_lanes();
  count_lanes_again();
}

// Computes a topological order of the nodes. If there is none, adds a finding and returns false.
bool Order::sort() {
  const std::uint32_t size = graph_.num_nodes();
  bool forward             = true;
  for (std::uint32_t node = 0; node < size && forward; ++node) {
    for (const std::uint32_t before : edges_.before({node})) forward &= before < node;
  }
  if (forward) return true;

  std::vector<std::uint32_t> waiting(size, 0), begin(size + 1, 0), targets(edges_.preds.size());
  for (const std::uint32_t before : edges_.preds) ++begin[before + 1];
  for (std::uint32_t i = 0; i < size; ++i) begin[i + 1] += begin[i];
  std::vector<std::uint32_t> next(begin.begin(), begin.end() - 1);
  for (std::uint32_t node = 0; node < size; ++node) {
    waiting[node] = static_cast<std::uint32_t>(edges_.before({node}).size());
    for (const std::uint32_t before : edges_.before({node})) targets[next[before]++] = node;
    if (waiting[node] == 0) sorted_.push_back(node);
  }
  for (std::size_t done = 0; done < sorted_.size(); ++done) {
    for (std::uint32_t i = begin[sorted_[done]]; i < begin[sorted_[done] + 1]; ++i) {
      if (--waiting[targets[i]] == 0) sorted_.push_back(targets[i]);
    }
  }
  if (sorted_.size() == size) return true;
  report_cycle(waiting);
  return false;
}

void Order::report_cycle(const std::vector<std::uint32_t>& waiting) {
  std::uint32_t at = 0;
  while (waiting[at] == 0) ++at;
  std::vector<std::uint32_t> path;
  while (std::find(path.begin(), path.end(), at) == path.end()) {
    path.push_back(at);
    const auto before = edges_.before({at});
    at = *std::find_if(before.begin(), before.end(), [&](std::uint32_t node) { return waiting[node] > 0; });
  }
  path.erase(path.begin(), std::find(path.begin(), path.end(), at));
  std::string text = "these nodes wait for each other:";
  for (std::size_t i = 0; i < path.size(); ++i) {
    text += str("\n    ", graph_.describe(Node{path[i]}), " waits for ",
                graph_.describe(Node{path[(i + 1) % path.size()]}), " (an edge)");
  }
  findings_.add(Flaw::deadlock, text);
}

void Order::count_lanes() {
  const std::uint32_t size = graph_.num_nodes();
  first_.resize(size);
  for (std::uint32_t i = 0; i < size; ++i) {
    const std::uint32_t node = sorted_.empty() ? i : sorted_[i];
    Clock& clock             = first_[node];
    clock.fill(0);
    for (const std::uint32_t before : edges_.before({node})) {
      for (std::size_t lane = 0; lane < num_lane_kinds; ++lane)
        clock[lane] = std::max(clock[lane], first_[before][lane]);
    }
    if (lane_[node] < 0) continue;
    const auto lane = static_cast<std::size_t>(lane_[node]);
    if (clock[lane] != position_[node]) {
      const std::string after = clock[lane] == 0 ? "no other node of the lane" : str("number ", clock[lane] - 1);
      findings_.add(Flaw::broken_lane, str(graph_.describe(Node{node}), " is number ", position_[node],
                                           " on its lane, but its edges put it after ", after));
    }
    clock[lane] = std::max(clock[lane], position_[node] + 1);
  }
}

// The clocks of a second run, counted in nodes of the first run's lanes.
void Order::count_lanes_again() {
  const std::uint32_t size = graph_.num_nodes();
  second_.resize(size);
  for (std::uint32_t i = 0; i < size; ++i) {
    const std::uint32_t node = sorted_.empty() ? i : sorted_[i];
    Clock& clock             = second_[node];
    clock.fill(0);
    for (const std::uint32_t before : edges_.before({node})) {
      for (std::size_t lane = 0; lane < num_lane_kinds; ++lane)
        clock[lane] = std::max(clock[lane], second_[before][lane]);
    }
    for (const std::uint32_t before : edges_.before_loop({node})) {
      for (std::size_t lane = 0; lane < num_lane_kinds; ++lane)
        clock[lane] = std::max(clock[lane], first_[before][lane]);
    }
    if (lane_[node] < 0 || position_[node] > 0) continue;
    const Lane lane{graph_.rank({node}), static_cast<LaneKind>(lane_[node])};
    if (clock[static_cast<std::size_t>(lane_[node])] != graph_.lane_size(lane)) {
      findings_.add(Flaw::loop_race, str("the lane's next run may overtake: ", graph_.describe(Node{node}),
                                         " of the next run is not after the last node of its lane in this run"));
    }
  }
}

std::vector<std::uint32_t> Order::places() const {
  std::vector<std::uint32_t> out(graph_.num_nodes());
  for (std::uint32_t i = 0; i < out.size(); ++i) out[sorted_.empty() ? i : sorted_[i]] = i;
  return out;
}

void Order::ask_about(Instance node) {
  asked_ = node;
  ++question_;
  for (const std::uint32_t before : node.second ? edges_.before_loop({node.node}) : edges_.before({node.node})) {
    direct_stamp_[before] = question_;
  }
}

bool Order::follows(Instance a) {
  if (lane_[a.node] >= 0) {
    const auto lane    = static_cast<std::size_t>(lane_[a.node]);
    const Clock& clock = asked_.second ? second_[asked_.node] : first_[asked_.node];
    return clock[lane] > position_[a.node];
  }
  return direct_stamp_[a.node] == question_ || search(a);
}

// Searches backwards from `asked_`, breadth first. `a` is in the first run.
bool Order::search(Instance a) {
  if (visited_stamp_.empty()) visited_stamp_.resize(2 * std::size_t{graph_.num_nodes()}, 0);
  ++search_;
  std::vector<Instance> queue{asked_};
  const auto visit = [&](std::uint32_t node, bool second) {
    std::uint32_t& stamp = visited_stamp_[2 * std::size_t{node} + (second ? 1 : 0)];
    if (stamp != search_) queue.push_back({node, second});
    stamp = search_;
    return node == a.node && second == a.second;
  };
  const bool forward = sorted_.empty();
  for (std::size_t next = 0; next < queue.size(); ++next) {
    const auto [node, second] = queue[next];
    for (const std::uint32_t before : edges_.before({node})) {
      if (forward && second == a.second && before < a.node) continue;
      if (visit(before, second)) return true;
    }
    if (!second) continue;
    for (const std::uint32_t before : edges_.before_loop({node})) {
      if (visit(before, false)) return true;
    }
  }
  return false;
}

}  // namespace stepgraph::verifier
