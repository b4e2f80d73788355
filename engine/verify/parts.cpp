#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "engine/base/error.hpp"
#include "engine/graph/shards.hpp"
#include "engine/verify/findings.hpp"

namespace stepgraph::verifier {
namespace {

// Key of the queues whose entries pair with each other: collectives of a group (from = to = -1), or messages between
// two ranks.
using Queue = std::tuple<std::uint32_t, int, int>;  // group, from, to

struct Member {
  int rank = -1;
  std::vector<std::uint32_t> nodes;  // in issue order
};

struct Members {
  std::size_t num_members = 0;         // of the group, or the two ends of a message
  std::map<std::size_t, Member> here;  // by place: those whose ranks the graph holds
};

using Queues = std::map<Queue, Members>;

// The members of a group that the graph holds. Of the group and the graph's ranks, the shorter list is walked.
void find_members(const Graph& graph, const RankList& ranks, Members& members) {
  members.num_members = ranks.size();
  const auto add      = [&](Rank rank) {
    const auto place = ranks.find(rank);
    if (place && graph.holds(rank)) members.here[*place].rank = index(rank);
  };
  if (ranks.size() < graph.ranks().size()) {
    for (const Rank rank : ranks) add(rank);
  } else {
    for (const Rank rank : graph.ranks()) add(rank);
  }
}

Queues collect(const Graph& graph) {
  std::vector<std::uint32_t> parts;
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    if (graph.has_part({node})) parts.push_back(node);
  }
  std::stable_sort(parts.begin(), parts.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return graph.part({a}).issue < graph.part({b}).issue; });
  Queues queues;
  for (const std::uint32_t node : parts) {
    const Graph::PartView part = graph.part({node});
    const int rank = index(graph.rank({node})), peer = index(part.peer);
    Queue key{part.group.id, -1, -1};
    if (part.op == PartOp::send) key = {part.group.id, rank, peer};
    if (part.op == PartOp::recv) key = {part.group.id, peer, rank};
    const RankList ends = point_to_point(part.op) ? RankList{Rank{std::get<1>(key)}, Rank{std::get<2>(key)}}
                                                  : graph.spec(part.group).ranks;
    Members& members    = queues[key];
    if (members.num_members == 0) find_members(graph, ends, members);
    members.here.at(*ends.find(Rank{rank})).nodes.push_back(node);
  }
  return queues;
}

// Describes a part, e.g. "all_reduce 'grads' of 4096 bytes f32".
std::string say(const Graph& graph, std::uint32_t node) {
  const Graph::PartView part = graph.part({node});
  std::string text = str(graph.describe(Node{node}), " (", to_string(part.op), " '", part.message, "', ", part.type);
  if (reduces(part.op)) text += str(" ", to_string(part.reduction));
  if (has_root(part.op)) text += str(", root ", part.root);
  if (part.op == PartOp::permute) text += str(", to rank ", part.peer, " and from rank ", part.source);
  return text + str(", sends ", part.bytes_read, " and receives ", part.bytes_written, " bytes)");
}

// The first property in which two matched parts differ; empty if they agree.
std::string difference(const Graph::PartView& a, const Graph::PartView& b) {
  if (a.op != b.op && !(a.op == PartOp::send && b.op == PartOp::recv)) return "op";
  if (a.type != b.type) return "type";
  if (has_root(a.op) && a.root != b.root) return "root";
  if (reduces(a.op) && a.reduction != b.reduction) return "reduction";
  if (a.message != b.message) return "message";
  return {};
}

// The sum, or the largest number if it is larger than that: all members together can have more bytes.
std::int64_t capped_sum(std::int64_t a, std::int64_t b) {
  constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();
  return b > largest - a ? largest : a + b;
}

// `complete`: all members are there. Else those that are there are compared.
bool check_meeting(const Graph& graph, const std::string& where, const std::vector<std::uint32_t>& nodes, bool complete,
                   Findings& findings) {
  const Graph::PartView first = graph.part({nodes.front()});
  std::int64_t all_read = 0, all_written = 0;
  for (const std::uint32_t node : nodes) {
    all_read               = capped_sum(all_read, graph.part({node}).bytes_read);
    all_written            = capped_sum(all_written, graph.part({node}).bytes_written);
    const std::string what = difference(first, graph.part({node}));
    if (what.empty()) continue;
    findings.add(Flaw::mismatched_part, str(where, ": ", say(graph, nodes.front()), " does not match ",
                                            say(graph, node), ": they differ in ", what));
    return false;
  }
  const auto wrong = misfit(graph, nodes);
  if (!wrong) return true;
  if (nodes.size() == 1) {
    findings.add(Flaw::mismatched_part, str(where, ": ", say(graph, wrong->node.id), ": ", wrong->why));
    return false;
  }
  const std::uint32_t other = wrong->node.id == nodes.front() ? nodes.back() : nodes.front();
  findings.add(Flaw::mismatched_part,
               str(where, ": ", say(graph, wrong->node.id), " does not match ", say(graph, other), ": ", wrong->why,
                   "; ", complete ? "all " : "the ", nodes.size(), complete ? " members" : " members here",
                   " together send ", all_read, " and receive ", all_written, " bytes"));
  return false;
}

}  // namespace

bool check_parts(const Graph& graph, Findings& findings) {
  bool sound = true;
  for (const auto& [queue, members] : collect(graph)) {
    const auto [group, from, to] = queue;
    std::size_t longest          = 0;
    for (const auto& [place, member] : members.here) longest = std::max(longest, member.nodes.size());
    for (std::size_t turn = 0; turn < longest && !findings.full(); ++turn) {
      const std::string where =
          str(from < 0 ? "operation " : "message ", turn, " on group '", graph.spec(Group{group}).name, "'");
      std::vector<std::uint32_t> nodes;
      std::string missing;
      for (const auto& [place, member] : members.here) {
        if (turn < member.nodes.size()) {
          nodes.push_back(member.nodes[turn]);
        } else {
          missing += str(missing.empty() ? "rank " : ", ", member.rank);
        }
      }
      if (!missing.empty()) {
        findings.add(Flaw::unmatched_part,
                     str(where, ": ", say(graph, nodes.front()), " has no matching part on ", missing));
        sound = false;
        break;  // later turns would pair parts that do not belong together
      }
      sound &= check_meeting(graph, where, nodes, members.here.size() == members.num_members, findings);
    }
  }
  return sound;
}

std::vector<std::vector<std::uint32_t>> meetings(const Graph& graph) {
  std::vector<std::vector<std::uint32_t>> out;
  for (const auto& [queue, members] : collect(graph)) {
    for (std::size_t turn = 0;; ++turn) {
      std::vector<std::uint32_t> nodes;
      for (const auto& [place, member] : members.here) {
        if (turn < member.nodes.size()) nodes.push_back(member.nodes[turn]);
      }
      if (nodes.empty()) break;
      out.push_back(std::move(nodes));
    }
  }
  return out;
}

}  // namespace stepgraph::verifier
