#include "engine/run/lowering.hpp"

#include <algorithm>
#include <queue>

#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/graph/matching.hpp"
#include "engine/graph/shards.hpp"
#include "engine/run/waiting_lanes.hpp"

namespace stepgraph {
namespace {

class Lowerer {
 public:
  Lowerer(const RunnableGraph& graph, const World& world)
      : graph_(graph.graph()), edges_(graph.edges()), data_(graph_.data()), world_(world) {}

  Lowering lower() {
    find_waiting_lanes();
    out_.leader.resize(data_.nodes.size());
    for (std::uint32_t node = 0; node < data_.nodes.size(); ++node) {
      out_.leader[node] = world_.is_local(Rank{data_.nodes[node].rank}) ? node : no_node;
    }
    if (data_.parts.empty()) {
      lower_edges_unmatched();
      if (&edges_ != &graph_.edges()) check_acyclic();  // derived edges follow the order of adding
    } else {
      match_parts();
      lower_edges();
      check_acyclic();
    }
    return std::move(out_);
  }

 private:
  void find_waiting_lanes() {
    out_.waiting_lanes = waiting_lanes(graph_, world_);
    if (out_.waiting_lanes.empty() || world_.device() != nullptr) return;  // on a device, host nodes wait by themselves
    out_.waits.resize(data_.nodes.size());
    for (std::uint32_t node = 0; node < data_.nodes.size(); ++node) {
      const NodeRecord& record = data_.nodes[node];
      out_.waits[node]         = record.lane >= 0 && world_.waits(static_cast<LaneKind>(record.lane));
      if (record.lane < 0 && record.part >= 0) {
        throw Error(ErrorKind::config, str("program: part '", data_.name(node), "' of rank ", record.rank,
                                           " has no lane, and this world's lanes wait (give it one: a part that waits "
                                           "without a lane would hold up computation)"));
      }
    }
  }

  void match_parts() {
    const Matching matching = stepgraph::match_parts(graph_, [&](Rank rank) { return world_.is_local(rank); });
    out_.match_of_node.assign(data_.nodes.size(), 0);
    for (std::size_t i = 0; i < matching.size(); ++i) {
      Match match;
      std::uint32_t leader = no_node;
      for (const std::uint32_t node : matching.meeting(i)) {
        const Rank rank            = graph_.rank({node});
        const Graph::PartView part = graph_.part({node});
        match.parts.push_back({{node}, rank, member_of(graph_.spec(part.group), rank), part.peer, part.source, {}, {}});
        leader = std::min(leader, node);
      }
      check_match(match);
      for (const std::uint32_t node : matching.meeting(i)) {
        out_.leader[node]        = leader;
        out_.match_of_node[node] = static_cast<std::uint32_t>(i);
      }
      out_.matches.push_back(std::move(match));
    }
  }

  // All expected parts are there and have the same operation. `verify` gives more detail.
  void check_match(const Match& match) const {
    const Node first           = match.parts.front().node;
    const Graph::PartView what = graph_.part(first);
    const GroupSpec& group     = graph_.spec(what.group);
    std::size_t expected       = 0;
    if (point_to_point(what.op)) {
      expected = 1 + (world_.is_local(what.peer) ? 1 : 0);
    } else {
      for (const Rank rank : group.ranks) expected += world_.is_local(rank) ? 1 : 0;
    }
    if (match.parts.size() != expected && graph_.only_rank()) {
      throw Error(
          ErrorKind::config,
          str("program: the graph holds only rank ", *graph_.only_rank(), ", but other members of group '", group.name,
              "' are also in this world (run the whole graph, or run the slice in a world with only this rank)"));
    }
    if (match.parts.size() != expected) {
      throw Error(ErrorKind::graph, str("program: ", graph_.describe(first), " (", to_string(what.op), " on group '",
                                        group.name, "') has ", match.parts.size() - 1, " matching parts instead of ",
                                        expected - 1, " (verify names the missing ranks)"));
    }
    for (const LocalPart& part : match.parts) {
      const Graph::PartView other = graph_.part(part.node);
      const bool same             = other.op == what.op || (point_to_point(other.op) && point_to_point(what.op));
      if (!same || other.type != what.type || (has_root(what.op) && other.root != what.root) ||
          (reduces(what.op) && other.reduction != what.reduction)) {
        throw Error(ErrorKind::graph,
                    str("program: ", graph_.describe(first), " and ", graph_.describe(part.node),
                        " are matched on group '", group.name, "', but differ (verify prints the difference)"));
      }
    }
    check_sizes(match);
  }

  // Worlds rely on it: all parts have the sizes that the operation needs.
  void check_sizes(const Match& match) const {
    const Graph::PartView what = graph_.part(match.parts.front().node);
    const GroupSpec& group     = graph_.spec(what.group);
    std::vector<std::uint32_t> nodes;
    for (const LocalPart& part : match.parts) nodes.push_back(part.node.id);
    std::optional<Misfit> found;
    if (nodes.size() == (point_to_point(what.op) ? 2 : group.ranks.size())) {
      found = misfit(graph_, nodes);
    } else {  // other members are in other processes
      for (const std::uint32_t node : nodes) {
        if (std::string why = misfit(graph_, Node{node}); !why.empty() && !found) found = Misfit{{node}, why};
      }
    }
    if (!found) return;
    const Graph::PartView part = graph_.part(found->node);
    throw Error(ErrorKind::graph,
                str("program: ", graph_.describe(found->node), " (", to_string(part.op), " on group '", group.name,
                    "', sends ", part.bytes_read, " and receives ", part.bytes_written, " bytes): ", found->why));
  }

  // Without parts each task is one node, and the edges are copied as they are.
  void lower_edges_unmatched() {
    out_.task_nodes.reserve(out_.leader.size());
    for (const std::uint32_t node : out_.leader) {
      if (node != no_node) out_.task_nodes.push_back(node);
    }
    out_.pred_begin = edges_.pred_begin;
    out_.preds      = edges_.preds;  // edges stay inside a rank
  }

  void lower_edges() {
    const auto num_nodes = static_cast<std::uint32_t>(data_.nodes.size());
    std::vector<std::uint32_t> seen(num_nodes, no_node);
    out_.pred_begin.reserve(num_nodes + 1);
    out_.pred_begin.push_back(0);
    for (std::uint32_t node = 0; node < num_nodes; ++node) {
      if (out_.leader[node] == node) {
        out_.task_nodes.push_back(node);
        const auto follow = [&](std::uint32_t before) {
          const std::uint32_t leader = out_.leader[before];
          if (seen[leader] == node) return;
          seen[leader] = node;
          out_.preds.push_back(leader);
        };
        const auto follow_all = [&](std::uint32_t member) {
          for (const std::uint32_t before : edges_.before({member})) follow(before);
        };
        if (data_.nodes[node].part >= 0) {
          for (const LocalPart& part : out_.matches[out_.match_of_node[node]].parts) follow_all(part.node.id);
        } else {
          follow_all(node);
        }
      }
      out_.pred_begin.push_back(static_cast<std::uint32_t>(out_.preds.size()));
    }
  }

  void check_acyclic() const {
    std::vector<std::uint32_t> waiting(data_.nodes.size(), 0), succ_begin(data_.nodes.size() + 1, 0),
        succs(out_.preds.size());
    for (const std::uint32_t before : out_.preds) ++succ_begin[before + 1];
    for (std::size_t i = 0; i < data_.nodes.size(); ++i) succ_begin[i + 1] += succ_begin[i];
    std::vector<std::uint32_t> next(succ_begin.begin(), succ_begin.end() - 1), ready;
    for (const std::uint32_t node : out_.task_nodes) {
      waiting[node] = out_.pred_begin[node + 1] - out_.pred_begin[node];
      if (waiting[node] == 0) ready.push_back(node);
      for (std::uint32_t i = out_.pred_begin[node]; i < out_.pred_begin[node + 1]; ++i)
        succs[next[out_.preds[i]]++] = node;
    }
    std::size_t num_done = 0;
    while (!ready.empty()) {
      const std::uint32_t node = ready.back();
      ready.pop_back();
      ++num_done;
      for (std::uint32_t i = succ_begin[node]; i < succ_begin[node + 1]; ++i) {
        if (--waiting[succs[i]] == 0) ready.push_back(succs[i]);
      }
    }
    if (num_done == out_.task_nodes.size()) return;
    const auto stuck =
        std::find_if(out_.task_nodes.begin(), out_.task_nodes.end(), [&](std::uint32_t n) { return waiting[n] > 0; });
    throw Error(ErrorKind::graph,
                str("program: ", out_.task_nodes.size() - num_done, " tasks wait for each other in a cycle, including ",
                    graph_.describe(Node{*stuck}), " (verify prints the cycle)"));
  }

  const Graph& graph_;
  const Edges& edges_;
  const GraphData& data_;
  const World& world_;
  Lowering out_;
};

}  // namespace

Lowering lower(const RunnableGraph& graph, const World& world) {
  graph.check_fits(world);
  return Lowerer(graph, world).lower();
}

std::vector<std::uint32_t> issue_order(const Lowering& lowering, const MemoryPlan* plan) {
  const std::size_t num_nodes = lowering.leader.size();
  std::vector<std::vector<std::uint32_t>> after(num_nodes);
  std::vector<std::uint32_t> waiting(num_nodes, 0);
  const auto later = [&](std::uint32_t a, std::uint32_t b) {
    if (!plan || plan->turns[a] == plan->turns[b]) return a > b;
    return plan->turns[a] > plan->turns[b];
  };
  std::priority_queue<std::uint32_t, std::vector<std::uint32_t>, decltype(later)> ready(later);
  for (const std::uint32_t node : lowering.task_nodes) {
    waiting[node] = lowering.pred_begin[node + 1] - lowering.pred_begin[node];
    for (std::uint32_t i = lowering.pred_begin[node]; i < lowering.pred_begin[node + 1]; ++i)
      after[lowering.preds[i]].push_back(node);
    if (waiting[node] == 0) ready.push(node);
  }
  std::vector<std::uint32_t> order;
  while (!ready.empty()) {
    const std::uint32_t node = ready.top();
    ready.pop();
    const Match* const match = lowering.matches.empty() ? nullptr : &lowering.matches[lowering.match_of_node[node]];
    if (match != nullptr && lowering.leader[match->parts.front().node.id] == node) {
      for (const LocalPart& part : match->parts) order.push_back(part.node.id);
    } else {
      order.push_back(node);
    }
    for (const std::uint32_t next : after[node]) {
      if (--waiting[next] == 0) ready.push(next);
    }
  }
  return order;
}

}  // namespace stepgraph
