#include "engine/look/least_time.hpp"

#include <algorithm>
#include <array>
#include <cstdint>

#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/graph/graph_data.hpp"
#include "engine/look/analysis.hpp"

namespace stepgraph {
namespace {

// TwoPhases counts the nodes of one rank's lanes.
void check_edges(const OrderedGraph& graph) {
  const Graph& of = graph.graph;
  for (std::uint32_t node = 0; node < of.num_nodes(); ++node) {
    for (const std::uint32_t before : graph.edges.before(Node{node})) {
      if (of.rank(Node{before}) == of.rank(Node{node})) continue;
      throw Error(ErrorKind::graph, str("least_time: an edge leads from ", of.describe(Node{before}), " to ",
                                        of.describe(Node{node}), " (edges between nodes of one rank)"));
    }
  }
}

// All nodes, each after its predecessors.
std::vector<std::uint32_t> in_order(const Edges& edges, std::uint32_t num_nodes) {
  std::vector<std::uint32_t> order(num_nodes), after_begin(num_nodes + 1, 0), after(edges.preds.size());
  for (const std::uint32_t before : edges.preds) ++after_begin[before + 1];
  for (std::uint32_t node = 0; node < num_nodes; ++node) after_begin[node + 1] += after_begin[node];
  std::vector<std::uint32_t> filled(after_begin.begin(), after_begin.end() - 1), waits_for(num_nodes);
  std::uint32_t num_ready = 0;
  for (std::uint32_t node = 0; node < num_nodes; ++node) {
    for (const std::uint32_t before : edges.before(Node{node})) after[filled[before]++] = node;
    waits_for[node] = static_cast<std::uint32_t>(edges.before(Node{node}).size());
    if (waits_for[node] == 0) order[num_ready++] = node;
  }
  for (std::uint32_t i = 0; i < num_ready; ++i) {
    for (std::uint32_t k = after_begin[order[i]]; k < after_begin[order[i] + 1]; ++k) {
      if (--waits_for[after[k]] == 0) order[num_ready++] = after[k];
    }
  }
  if (num_ready == num_nodes) return order;
  throw Error(ErrorKind::graph, str("least_time: ", num_nodes - num_ready, " of ", num_nodes,
                                    " nodes follow nodes that wait for each other (edges without a circle)"));
}

// The nodes of a lane run one after another. If one of them comes before a node, so do all earlier ones; if one comes
// after a node, so do all later ones. So two numbers for each node and lane say which nodes of the lane come before and
// after the node.
class TwoPhases {
 public:
  TwoPhases(const OrderedGraph& graph, const Timeline& timeline)
      : data_(graph.graph.data()),
        times_(timeline.nodes),
        lanes_(data_.ranks.size() * num_lane_kinds),
        position_(times_.size()),
        num_before_(times_.size(), Counts{}),
        first_after_(times_.size()) {
    for (std::uint32_t node = 0; node < times_.size(); ++node) {
      if (data_.nodes[node].lane < 0) continue;
      LaneTimes& lane = lanes_[lane_number(node, kind_of(node))];
      position_[node] = static_cast<std::uint32_t>(lane.busy_s.size() - 1);
      lane.add(times_[node]);
    }
    const std::vector<std::uint32_t> order = in_order(graph.edges, static_cast<std::uint32_t>(times_.size()));
    look_back(graph.edges, order);
    look_ahead(graph.edges, order);
  }

  // Replaces `best` by longer phases, if there are any.
  void improve(LeastTime& best) const {
    for (std::uint32_t node = 0; node < times_.size(); ++node) {
      if (!times_[node].ran()) continue;
      const LeastTime::Phase before =
          busiest(node, [&](const LaneTimes& lane, std::size_t kind) { return lane.busy_s[num_before_[node][kind]]; });
      const LeastTime::Phase after = busiest(node, [&](const LaneTimes& lane, std::size_t kind) {
        return lane.busy_s.back() - lane.busy_s[first_after_[node][kind]];
      });
      const double own_s           = times_[node].end_s - times_[node].begin_s;
      const double seconds         = before.busy_s + own_s + after.busy_s;
      if (seconds <= best.seconds) continue;
      best                       = {.seconds = seconds, .phases = {}, .between = Node{node}};
      const std::int32_t on_lane = data_.nodes[node].lane;
      add_phase(best, before);
      add_phase(best, {.rank   = before.rank,
                       .lane   = on_lane >= 0 ? std::optional(static_cast<LaneKind>(on_lane)) : std::nullopt,
                       .busy_s = own_s});
      add_phase(best, after);
    }
  }

 private:
  using Counts = std::array<std::uint32_t, num_lane_kinds>;  // by lane of the node's rank

  struct LaneTimes {
    std::vector<double> busy_s = {0};  // element k: of the first k nodes
    double until_s             = 0;
    // A moment counts once, so that nodes of a measured step may overlap.
    void add(const NodeTime& time) {
      const double from_s = std::max(time.begin_s, until_s);
      busy_s.push_back(busy_s.back() + std::max(0.0, time.end_s - from_s));
      until_s = std::max(until_s, time.end_s);
    }
  };

  static void add_phase(LeastTime& to, const LeastTime::Phase& phase) {
    if (phase.busy_s <= 0) return;
    if (to.phases.empty() || to.phases.back().lane != phase.lane)
      to.phases.push_back(phase);
    else
      to.phases.back().busy_s += phase.busy_s;
  }

  void look_back(const Edges& edges, const std::vector<std::uint32_t>& order) {
    for (const std::uint32_t node : order) {
      Counts& mine = num_before_[node];
      for (const std::uint32_t before : edges.before(Node{node})) {
        const Counts& its = num_before_[before];
        for (std::size_t kind = 0; kind < num_lane_kinds; ++kind) mine[kind] = std::max(mine[kind], its[kind]);
        if (data_.nodes[before].lane < 0) continue;
        std::uint32_t& count = mine[kind_of(before)];
        count                = std::max(count, position_[before] + 1);
      }
    }
  }

  void look_ahead(const Edges& edges, const std::vector<std::uint32_t>& order) {
    for (std::uint32_t node = 0; node < times_.size(); ++node) {
      for (std::size_t kind = 0; kind < num_lane_kinds; ++kind)
        first_after_[node][kind] = static_cast<std::uint32_t>(lanes_[lane_number(node, kind)].busy_s.size() - 1);
    }
    for (auto node = order.rbegin(); node != order.rend(); ++node) {
      Counts mine = first_after_[*node];
      if (data_.nodes[*node].lane >= 0) mine[kind_of(*node)] = std::min(mine[kind_of(*node)], position_[*node]);
      for (const std::uint32_t before : edges.before(Node{*node})) {
        Counts& its = first_after_[before];
        for (std::size_t kind = 0; kind < num_lane_kinds; ++kind) its[kind] = std::min(its[kind], mine[kind]);
      }
    }
  }

  template <class BusyOf>
  [[nodiscard]] LeastTime::Phase busiest(std::uint32_t node, const BusyOf& busy_of) const {
    LeastTime::Phase most{.rank = data_.ranks[data_.nodes[node].place]};
    for (std::size_t kind = 0; kind < num_lane_kinds; ++kind) {
      const double busy_s = busy_of(lanes_[lane_number(node, kind)], kind);
      if (busy_s <= most.busy_s) continue;
      most.lane   = static_cast<LaneKind>(kind);
      most.busy_s = busy_s;
    }
    return most;
  }

  [[nodiscard]] std::size_t kind_of(std::uint32_t node) const {
    return static_cast<std::size_t>(data_.nodes[node].lane);
  }
  [[nodiscard]] std::size_t lane_number(std::uint32_t node, std::size_t kind) const {
    return data_.nodes[node].place * num_lane_kinds + kind;
  }

  const GraphData& data_;
  const std::vector<NodeTime>& times_;
  std::vector<LaneTimes> lanes_;         // by place of the rank, then kind
  std::vector<std::uint32_t> position_;  // by node: on its lane
  std::vector<Counts> num_before_;       // by node
  std::vector<Counts> first_after_;      // by node: a position; the number of nodes if none comes after it
};

}  // namespace

LeastTime least_time(const OrderedGraph& graph, const Timeline& timeline) {
  LeastTime best;
  for (const LaneBusy& lane : busy_lanes(graph.graph, timeline)) {
    if (!best.phases.empty() && lane.busy_s <= best.seconds) continue;
    best = {.seconds = lane.busy_s, .phases = {{lane.rank, lane.lane, lane.busy_s}}};
  }
  check_edges(graph);
  TwoPhases(graph, timeline).improve(best);
  return best;
}

}  // namespace stepgraph
