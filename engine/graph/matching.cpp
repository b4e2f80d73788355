#include "engine/graph/matching.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "engine/graph/graph_data.hpp"

namespace stepgraph {
namespace {

// Parts with equal keys meet. Messages are counted per sender and receiver, other operations per member.
struct PartKey {
  std::uint32_t group;
  std::int32_t from, to;  // -1 unless a message
  std::uint32_t number;   // among the operations of the member, or the messages from sender to receiver
  int member;             // place in the group; for a message 0 for the sender, 1 for the receiver
  std::uint32_t part;
  [[nodiscard]] auto meets() const { return std::tuple(group, from, to, number); }
};

}  // namespace

Matching match_parts(const Graph& graph) {
  const GraphData& data = graph.data();
  Matching out;
  if (data.parts.empty()) return out;
  const auto rank_of = [&](std::uint32_t part) { return data.nodes[data.parts[part].node].rank; };
  std::vector<std::uint32_t> order(data.parts.size());
  std::iota(order.begin(), order.end(), std::uint32_t{0});
  // Each member's parts of each group, in issue order.
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    const PartRecord &p = data.parts[a], &q = data.parts[b];
    return std::tuple(p.group, rank_of(a), p.issue) < std::tuple(q.group, rank_of(b), q.issue);
  });
  std::vector<PartKey> keys;
  keys.reserve(order.size());
  std::map<std::int32_t, std::uint32_t> sent, received;  // by peer: messages so far
  for (std::size_t i = 0; i < order.size();) {
    const PartRecord& first = data.parts[order[i]];
    const std::int32_t rank = rank_of(order[i]);
    const GroupSpec& group  = data.groups[first.group];
    const int member        = member_of(group, Rank{rank});
    std::uint32_t number    = 0;
    sent.clear();
    received.clear();
    for (; i < order.size() && data.parts[order[i]].group == first.group && rank_of(order[i]) == rank; ++i) {
      const PartRecord& part  = data.parts[order[i]];
      const std::int32_t peer = index(part.peer);
      if (part.op == PartOp::send) {
        keys.push_back({part.group, rank, peer, sent[peer]++, 0, order[i]});
      } else if (part.op == PartOp::recv) {
        keys.push_back({part.group, peer, rank, received[peer]++, 1, order[i]});
      } else {
        keys.push_back({part.group, -1, -1, number++, member, order[i]});
      }
    }
  }
  std::sort(keys.begin(), keys.end(), [](const PartKey& a, const PartKey& b) {
    return std::tuple(a.meets(), a.member) < std::tuple(b.meets(), b.member);
  });

  out.of_node.assign(data.nodes.size(), Matching::none);
  out.nodes.reserve(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const bool first = i == 0 || keys[i].meets() != keys[i - 1].meets();
    if (first) out.turn.push_back(keys[i].number);
    if (first && i > 0) out.begin.push_back(static_cast<std::uint32_t>(i));
    const std::uint32_t node = data.parts[keys[i].part].node;
    out.of_node[node]        = static_cast<std::uint32_t>(out.begin.size() - 1);
    out.nodes.push_back(node);
  }
  if (!keys.empty()) out.begin.push_back(static_cast<std::uint32_t>(keys.size()));
  return out;
}

double bytes_in_shared_memory(const Graph& graph, Node part) {
  const Graph::PartView view = graph.part(part);
  return std::max(static_cast<double>(view.bytes_read + view.bytes_written), graph.cost(part).bytes_moved);
}

}  // namespace stepgraph
