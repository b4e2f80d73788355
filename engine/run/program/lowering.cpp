#include "engine/run/program/lowering.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <queue>
#include <tuple>

#include "engine/base/disjoint_sets.hpp"
#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/graph/matching.hpp"
#include "engine/graph/shards.hpp"
#include "engine/run/threads/waiting_lanes.hpp"

namespace stepgraph {
namespace {

class Lowerer {
 public:
  Lowerer(const RunnableGraph& graph, const World& world)
      : graph_(graph.graph()), edges_(graph.edges()), data_(graph_.data()), world_(world) {}

  Lowering lower() {
    find_waiting_lanes();
    out_.leader.resize(data_.nodes.size());
    std::iota(out_.leader.begin(), out_.leader.end(), std::uint32_t{0});
    if (data_.parts.empty()) {
      lower_edges_unmatched();
      if (&edges_ != &graph_.edges()) check_acyclic();  // derived edges follow the order of adding
    } else {
      check_memory_of_parts();
      match_parts();
      lower_edges();
      check_acyclic();
    }
    return std::move(out_);
  }

 private:
  void find_waiting_lanes() {
    out_.waiting_lanes = waiting_lanes(graph_, world_);
    if (world_.device() != nullptr) return;  // on a device, host nodes wait by themselves
    if (parts_wait(world_)) check_lanes_of_parts();
    if (out_.waiting_lanes.empty()) return;
    out_.waits.resize(data_.nodes.size());
    for (std::uint32_t node = 0; node < data_.nodes.size(); ++node)
      out_.waits[node] = waits(graph_, Node{node}, world_);
  }

  // A part that waits while its thread counts as computing could wait for a node that its process cannot start.
  void check_lanes_of_parts() const {
    for (const PartRecord& part : data_.parts) {
      const Node node{part.node};
      if (waits(graph_, node, world_)) continue;
      const auto lane = graph_.lane(node);
      throw Error(ErrorKind::config,
                  str("program: part '", data_.name(part.node), "' of rank ", graph_.rank(node), " has ",
                      lane ? str("lane ", lane->kind, ", which does not wait") : "no lane",
                      ", and this world's lanes wait (give it one of tp, gather, reduce, pp_send or pp_recv: a part "
                      "that waits on another lane, or on none, would hold up computation)"));
    }
  }

  void match_parts() {
    const Matching matching = stepgraph::match_parts(graph_);
    out_.match_of_node.assign(data_.nodes.size(), 0);
    const std::vector<std::uint32_t> batch = batches(matching);
    std::vector<std::uint32_t> order(matching.size());
    std::iota(order.begin(), order.end(), std::uint32_t{0});
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return batch[a] < batch[b]; });
    for (std::size_t i = 0; i < order.size();) {
      const auto first     = static_cast<std::uint32_t>(i);
      std::uint32_t leader = no_node;
      for (; i < order.size() && batch[order[i]] == batch[order[first]]; ++i) {
        out_.matches.push_back(make_match(matching, order[i]));
        for (const std::uint32_t node : matching.meeting(order[i])) leader = std::min(leader, node);
      }
      out_.matches[first].batch_size = static_cast<std::uint32_t>(i) - first;
      for (std::size_t k = first; k < i; ++k) {
        for (const std::uint32_t node : matching.meeting(order[k])) {
          out_.leader[node]        = leader;
          out_.match_of_node[node] = first;
        }
      }
    }
  }

  // A world gets the addresses of what a part reads and writes.
  void check_memory_of_parts() const {
    for (const PartRecord& part : data_.parts) {
      for (std::uint32_t i = data_.nodes[part.node].access_begin; i < data_.access_end(part.node); ++i) {
        const BufferSpec& buffer = data_.buffers[data_.accesses[i].buffer()];
        if (buffer.space != Space::disk) continue;
        throw Error(
            ErrorKind::config,
            str("program: part '", data_.name(part.node), "' of rank ", buffer.rank, " uses buffer '", buffer.name,
                "', which is on disk (copy it to a buffer in ", to_string(Space::pinned), " memory first)"));
      }
    }
  }

  [[nodiscard]] Match make_match(const Matching& matching, std::uint32_t meeting) const {
    Match match{.turn = matching.turn[meeting], .parts = {}, .pieces = {}};
    for (const std::uint32_t node : matching.meeting(meeting)) {
      const Rank rank            = graph_.rank({node});
      const Graph::PartView part = graph_.part({node});
      match.parts.push_back({{node}, rank, member_of(graph_.spec(part.group), rank), part.peer, part.source, {}, {}});
    }
    check_match(match);
    return match;
  }

  // By meeting: its batch. Meetings with parts that a rank issues together are one batch, if the world takes batches.
  [[nodiscard]] std::vector<std::uint32_t> batches(const Matching& matching) const {
    DisjointSets sets(matching.size());
    std::map<std::pair<std::int32_t, std::int32_t>, std::uint32_t> first;  // by rank and issue position
    for (std::uint32_t i = 0; world_.batches() && i < matching.size(); ++i) {
      for (const std::uint32_t node : matching.meeting(i)) {
        const PartRecord& part = data_.parts[static_cast<std::size_t>(data_.nodes[node].part)];
        sets.join(i, first.try_emplace({data_.nodes[node].rank, part.issue}, i).first->second);
      }
    }
    return std::move(sets).roots();
  }

  // All expected parts are there and have the same operation. `verify` gives more detail.
  void check_match(const Match& match) const {
    const Node first           = match.parts.front().node;
    const Graph::PartView what = graph_.part(first);
    const GroupSpec& group     = graph_.spec(what.group);
    const std::size_t expected =
        point_to_point(what.op) ? (graph_.holds(what.peer) ? 2 : 1) : graph_.ranks().num_in(group.ranks);
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
    const std::optional<Misfit> found = misfit(graph_, nodes);
    if (!found) return;
    const Graph::PartView part = graph_.part(found->node);
    throw Error(ErrorKind::graph,
                str("program: ", graph_.describe(found->node), " (", to_string(part.op), " on group '", group.name,
                    "', sends ", part.bytes_read, " and receives ", part.bytes_written, " bytes): ", found->why));
  }

  // Without parts each task is one node, and the edges are copied as they are.
  void lower_edges_unmatched() {
    out_.task_nodes = out_.leader;
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
          const std::uint32_t first = out_.match_of_node[node];
          for (std::uint32_t i = first; i < first + out_.matches[first].batch_size; ++i) {
            for (const LocalPart& part : out_.matches[i].parts) follow_all(part.node.id);
          }
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

void prepare_world(World& world, const Graph& graph, std::vector<Match>& matches) {
  const auto group_of = [&](const Match& match) { return graph.part(match.parts.front().node).group.id; };
  std::map<std::uint32_t, std::uint32_t> num_operations;  // by group
  for (const Match& match : matches) ++num_operations[group_of(match)];
  std::vector<std::uint32_t> groups;
  for (const auto& [group, count] : num_operations) groups.push_back(group);
  std::sort(groups.begin(), groups.end(), [&](std::uint32_t a, std::uint32_t b) {
    const GroupSpec &p = graph.spec(Group{a}), &q = graph.spec(Group{b});
    return std::tie(p.name, p.ranks) < std::tie(q.name, q.ranks);
  });
  const auto twin = std::adjacent_find(groups.begin(), groups.end(), [&](std::uint32_t a, std::uint32_t b) {
    const GroupSpec &p = graph.spec(Group{a}), &q = graph.spec(Group{b});
    return p.name == q.name && p.ranks == q.ranks;
  });
  if (twin != groups.end())
    throw Error(ErrorKind::config, str("program: two groups of the same ranks have the name '",
                                       graph.spec(Group{*twin}).name, "' (a name for each)"));
  std::vector<Communicator> communicators;
  for (const std::uint32_t group : groups)
    communicators.push_back({graph.spec(Group{group}), num_operations.at(group)});
  const std::vector<std::uint32_t> numbers = world.prepare(graph, communicators);
  if (numbers.size() != groups.size())
    throw Error(ErrorKind::config, str("world: prepare() returned ", numbers.size(), " numbers for ", groups.size(),
                                       " groups (one for each)"));
  std::map<std::uint32_t, std::uint32_t> number_of;  // by group
  for (std::size_t i = 0; i < groups.size(); ++i) number_of[groups[i]] = numbers[i];
  for (Match& match : matches) match.communicator = number_of.at(group_of(match));
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
    const std::uint32_t first = lowering.matches.empty() ? 0 : lowering.match_of_node[node];
    if (!lowering.matches.empty() && lowering.leader[lowering.matches[first].parts.front().node.id] == node) {
      for (std::uint32_t i = first; i < first + lowering.matches[first].batch_size; ++i) {
        for (const LocalPart& part : lowering.matches[i].parts) order.push_back(part.node.id);
      }
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
