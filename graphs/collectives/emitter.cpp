#include "graphs/collectives/emitter.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "engine/base/error.hpp"
#include "engine/graph/shards.hpp"
#include "ops/tape/streams.hpp"

namespace stepgraph {
namespace {

// A part's accesses, tokens apart.
struct PartAccesses {
  AccessList in, out;
  AccessList token_reads, token_writes, token_accumulates;
};

PartAccesses split(const Graph& graph, const NodeSpec& spec) {
  PartAccesses out;
  const auto sort = [&](const AccessList& list, AccessList& tokens, bool in, bool written) {
    for (const Access& access : list.view()) {
      if (graph.spec(access.buffer).token) {
        tokens.push_back(access);
        continue;
      }
      if (in) out.in.push_back(access);
      if (written) out.out.push_back(access);
    }
  };
  sort(spec.reads, out.token_reads, true, false);
  sort(spec.writes, out.token_writes, false, true);
  sort(spec.accumulates, out.token_accumulates, true, true);
  return out;
}

bool same(const AccessList& a, const AccessList& b) {
  return std::equal(a.view().begin(), a.view().end(), b.view().begin(), b.view().end(),
                    [](const Access& x, const Access& y) { return x.buffer == y.buffer && x.region == y.region; });
}

std::int64_t total(const Bytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0},
                         [](std::int64_t sum, const ByteRange& range) { return sum + range.length; });
}

// The transfers of one round, by member: the one that it sends, and the one that it receives.
struct Messages {
  std::vector<int> sent, received;  // -1: none
  bool permutes = false;            // some member sends and receives: then all members take part
  [[nodiscard]] bool has(std::size_t member) const { return permutes || sent[member] >= 0 || received[member] >= 0; }
};

std::vector<Messages> messages_of(const Rounds& rounds) {
  std::vector<Messages> out;
  const std::size_t members = rounds.work_bytes.size();
  for (const Round& round : rounds.rounds) {
    Messages& now = out.emplace_back(Messages{std::vector<int>(members, -1), std::vector<int>(members, -1), false});
    for (int i = 0; i < std::ssize(round.transfers); ++i) {
      const Transfer& transfer = round.transfers[static_cast<std::size_t>(i)];
      if (total(transfer.source) == 0 && !rounds.keep_empty) continue;
      now.sent[static_cast<std::size_t>(transfer.from)]   = i;
      now.received[static_cast<std::size_t>(transfer.to)] = i;
    }
    for (std::size_t m = 0; m < members; ++m) now.permutes |= now.sent[m] >= 0 && now.received[m] >= 0;
  }
  return out;
}

// The nodes of one member.
class Member {
 public:
  Member(const Graph& graph, Graph& out, Node part, Group group, const Expansion& expansion,
         const std::vector<Messages>& messages)
      : old_(graph),
        out_(out),
        spec_(graph.spec(part)),
        part_(graph.part(part)),
        accesses_(split(graph, spec_)),
        member_(static_cast<int>(member_of(graph, part))),
        group_(group),
        expansion_(expansion),
        messages_(messages) {}

  // Adds them; `issue` is the place of the first part.
  void add(std::int32_t issue) {
    for (std::size_t i = 0; i < expansion_.rounds.rounds.size(); ++i) add_round(i);
    if (nodes_.empty()) nodes_.push_back({with_labels("done", NodeKind::compute), {}});
    add_tokens();
    for (auto& [node, body] : nodes_) {
      if (node.part) node.part->issue = issue++;
      out_.add(node, body);
    }
  }

 private:
  // --- bytes -----------------------------------------------------------------------------------------------------
  [[nodiscard]] Buffer work() {
    if (work_) return *work_;
    work_ = new_buffer(str(spec_.name, " work"), expansion_.rounds.work_bytes[static_cast<std::size_t>(member_)]);
    return *work_;
  }
  [[nodiscard]] Buffer new_buffer(std::string name, std::int64_t bytes) {
    const AccessList& any = accesses_.in.empty() ? accesses_.out : accesses_.in;
    return out_.buffer({.name       = std::move(name),
                        .rank       = *spec_.rank,
                        .size_bytes = bytes,
                        .type       = part_.type,
                        .space      = old_.spec(any.view().front().buffer).space});
  }
  [[nodiscard]] AccessList accesses(const Bytes& bytes) {
    AccessList list;
    for (const ByteRange& range : bytes) {
      if (range.length == 0) continue;
      if (range.store == Store::work) {
        list.push_back(work().range(range.begin, range.length));
        continue;
      }
      const AccessList cut_out =
          cut(old_, range.store == Store::in ? accesses_.in : accesses_.out, range.begin, range.length);
      for (const Access& access : cut_out.view()) list.push_back(access);
    }
    return list;
  }

  // --- nodes -----------------------------------------------------------------------------------------------------
  [[nodiscard]] NodeSpec with_labels(std::string_view what, NodeKind kind) const {
    NodeSpec node{.name   = str(spec_.name, " ", what),
                  .lane   = spec_.lane,
                  .kind   = kind,
                  .labels = spec_.labels,
                  .rank   = spec_.rank};
    return node;
  }

  void add_round(std::size_t number) {
    const Round& round       = expansion_.rounds.rounds[number];
    const Messages& messages = messages_[number];
    const auto member        = static_cast<std::size_t>(member_);
    const auto transfer      = [&](int i) { return i < 0 ? nullptr : &round.transfers[static_cast<std::size_t>(i)]; };
    if (messages.has(member))
      add_messages(number, transfer(messages.sent[member]), transfer(messages.received[member]), messages.permutes);
    for (const LocalWork& local : round.locals) {
      if (local.member == member_ && total(local.into) > 0) add_local(local);
    }
  }

  // A round in which some member sends and receives is one permutation; else its transfers are separate messages.
  void add_messages(std::size_t number, const Transfer* sent, const Transfer* received, bool permutes) {
    const RankList& ranks = old_.spec(part_.group).ranks;
    const PartOp op       = permutes ? PartOp::permute : sent ? PartOp::send : PartOp::recv;
    NodeSpec node         = with_labels(str(expansion_.algorithm, " ", number), NodeKind::communicate);
    node.op               = std::string(to_string(op));
    node.part             = PartSpec{.group   = group_,
                                     .op      = op,
                                     .type    = part_.type,
                                     .message = str(part_.message, " ", expansion_.algorithm, " ", number)};
    if (sent) {
      node.part->peer      = ranks[static_cast<std::size_t>(sent->to)];
      node.reads           = accesses(sent->source);
      node.cost.bytes_sent = static_cast<double>(total(sent->source));
    }
    Bytes target;
    std::optional<Buffer> arrived;
    if (received) {
      (permutes ? node.part->source : node.part->peer) = ranks[static_cast<std::size_t>(received->from)];
      target                                           = received->target;
      if (received->reduce) {
        arrived     = new_buffer(str(spec_.name, " arrived ", number), total(target));
        node.writes = *arrived;
      } else {
        node.writes = accesses(target);
      }
    }
    node.cost.bytes_moved = static_cast<double>(num_bytes(out_, node.reads) + num_bytes(out_, node.writes));
    nodes_.push_back({std::move(node), {}});
    if (arrived) add_reduction(accesses(target), *arrived);
  }

  void add_reduction(const AccessList& into, const AccessList& from) {
    NodeSpec node    = with_labels("reduce", NodeKind::compute);
    const auto bytes = static_cast<double>(num_bytes(out_, into));
    node.reads       = from;
    node.accumulates = into;
    node.op          = "reduce_into";
    node.parallel    = true;
    node.device      = true;
    node.cost        = {.flops = bytes / static_cast<double>(size_bytes(part_.type)), .bytes_moved = 3 * bytes};
    nodes_.push_back({std::move(node), reduce_body({.reads = from.view().size(), .accumulates = into.view().size()},
                                                   part_.type, part_.reduction)});
  }

  void add_local(const LocalWork& local) {
    const AccessList into = accesses(local.into), from = accesses(local.from);
    if (local.kind == LocalWork::Kind::reduce) return add_reduction(into, from);
    const auto bytes = static_cast<double>(num_bytes(out_, into));
    if (local.kind == LocalWork::Kind::copy) {
      NodeSpec node = with_labels("copy", NodeKind::copy);
      node.reads    = from;
      node.writes   = into;
      node.op       = "copy";
      node.parallel = true;
      node.device   = true;
      node.cost     = {.bytes_moved = 2 * bytes};
      nodes_.push_back({std::move(node), copy_body({.reads = from.view().size(), .writes = into.view().size()})});
    } else {
      NodeSpec node    = with_labels("divide", NodeKind::compute);
      node.accumulates = into;
      node.op          = "divide";
      node.parallel    = true;
      node.device      = true;
      node.cost        = {.flops = bytes / static_cast<double>(size_bytes(part_.type)), .bytes_moved = 2 * bytes};
      nodes_.push_back({std::move(node), divide_body({.accumulates = into.view().size()}, part_.type,
                                                     std::ssize(old_.spec(part_.group).ranks))});
    }
  }

  // On a lane the first node waits for what the part waited for, and the last lets go of it; without one, all do.
  void add_tokens() {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (spec_.lane && i != 0 && i + 1 != nodes_.size()) continue;
      NodeSpec& node = nodes_[i].first;
      for (const Access& access : accesses_.token_reads.view()) node.reads.push_back(access);
      for (const Access& access : accesses_.token_writes.view()) node.writes.push_back(access);
      for (const Access& access : accesses_.token_accumulates.view()) node.accumulates.push_back(access);
    }
  }

  const Graph& old_;
  Graph& out_;
  NodeSpec spec_;
  Graph::PartView part_;
  PartAccesses accesses_;
  int member_;
  Group group_;
  const Expansion& expansion_;
  const std::vector<Messages>& messages_;  // by round
  std::optional<Buffer> work_;
  std::vector<std::pair<NodeSpec, Body>> nodes_;
};

// Where each part stands in its rank's issue order once collectives have become several.
class Issues {
 public:
  Issues(const Graph& graph, const Matching& matching, const std::vector<std::optional<Expansion>>& expansions,
         const std::vector<std::vector<Messages>>& messages)
      : first_(graph.num_nodes(), -1) {
    std::map<Rank, std::vector<std::uint32_t>> by_rank;
    for (const std::uint32_t node : matching.nodes) by_rank[graph.rank({node})].push_back(node);
    for (auto& [rank, parts] : by_rank) {
      const auto issue = [&](std::uint32_t node) { return graph.part({node}).issue; };
      std::stable_sort(parts.begin(), parts.end(), [&](auto a, auto b) { return issue(a) < issue(b); });
      std::int32_t next = 0;
      for (std::size_t begin = 0, end = 0; begin < parts.size(); begin = end) {
        while (end < parts.size() && issue(parts[end]) == issue(parts[begin])) ++end;
        std::int32_t places = 1;
        for (std::size_t i = begin; i < end; ++i) {
          first_[parts[i]]            = next;
          const std::uint32_t meeting = matching.of_node[parts[i]];
          if (!expansions[meeting]) continue;
          if (end - begin > 1) {
            throw Error(ErrorKind::config,
                        str("expand: ", graph.describe(Node{parts[i]}), " is issued together with ",
                            graph.describe(Node{parts[i == begin ? i + 1 : begin]}),
                            " (a collective that is expanded into several messages must be issued alone)"));
          }
          const std::size_t member = member_of(graph, {parts[i]});
          places = static_cast<std::int32_t>(std::count_if(messages[meeting].begin(), messages[meeting].end(),
                                                           [&](const Messages& round) { return round.has(member); }));
        }
        next += places;
      }
    }
  }
  [[nodiscard]] std::int32_t first(std::uint32_t node) const { return first_[node]; }

 private:
  std::vector<std::int32_t> first_;  // by node
};

}  // namespace

bool is_in_place(const Graph& graph, Node part) {
  const Graph::PartView view  = graph.part(part);
  const PartAccesses accesses = split(graph, graph.spec(part));
  const std::size_t member    = member_of(graph, part);
  const auto own              = [&](const AccessList& all, Side side) {
    const auto sizes = shard_sizes(graph, part, side);
    return sizes ? cut(graph, all, sizes->begin(member), (*sizes)[member]) : AccessList();
  };
  const auto whole = [&](const AccessList& all) { return cut(graph, all, 0, num_bytes(graph, all)); };
  switch (view.op) {
    case PartOp::all_reduce:
      return same(whole(accesses.in), whole(accesses.out));
    case PartOp::reduce:
    case PartOp::broadcast:
      return graph.rank(part) == view.root && same(whole(accesses.in), whole(accesses.out));
    case PartOp::all_gather:
      return same(whole(accesses.in), own(accesses.out, Side::out));
    case PartOp::gather:
      return graph.rank(part) == view.root && same(whole(accesses.in), own(accesses.out, Side::out));
    case PartOp::scatter:
      return graph.rank(part) == view.root && same(whole(accesses.out), own(accesses.in, Side::in));
    case PartOp::all_to_all:  // staging is right whether or not they share: one byte in common is enough
      return std::any_of(accesses.in.view().begin(), accesses.in.view().end(), [&](const Access& a) {
        return std::any_of(accesses.out.view().begin(), accesses.out.view().end(),
                           [&](const Access& b) { return a.buffer == b.buffer; });
      });
    default:
      return false;
  }
}

Graph emit(const Graph& graph, const Matching& matching, const std::vector<std::optional<Expansion>>& expansions) {
  Graph out(graph.num_ranks(), graph.ranks());
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& buffer = graph.spec(Buffer{i});
    (void)(buffer.token ? out.token(buffer.rank, buffer.name) : out.buffer(buffer));
  }
  for (std::uint32_t i = 0; i < graph.num_groups(); ++i) (void)out.group(graph.spec(Group{i}));
  // Messages of an expansion have a communicator of their own, so they pair with nothing else.
  std::map<std::pair<std::uint32_t, Algorithm>, Group> groups;
  std::vector<std::vector<Messages>> messages(expansions.size());
  for (std::size_t i = 0; i < expansions.size(); ++i) {
    if (!expansions[i]) continue;
    messages[i]       = messages_of(expansions[i]->rounds);
    const Group group = graph.part({matching.meeting(i).front()}).group;
    const auto key    = std::pair(group.id, expansions[i]->algorithm);
    if (groups.contains(key)) continue;
    GroupSpec spec = graph.spec(group);
    spec.name += str("/", expansions[i]->algorithm);
    groups[key] = out.group(spec);
  }
  const Issues issues(graph, matching, expansions, messages);
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    const Node node{i};
    if (!graph.has_part(node)) {
      out.add(graph.spec(node), graph.body(node));
      continue;
    }
    const std::uint32_t meeting = matching.of_node[i];
    if (expansions[meeting]) {
      const Group group = groups.at({graph.part(node).group.id, expansions[meeting]->algorithm});
      Member(graph, out, node, group, *expansions[meeting], messages[meeting]).add(issues.first(i));
    } else {
      NodeSpec spec    = graph.spec(node);
      spec.part->issue = issues.first(i);
      out.add(spec);
    }
  }
  return out;
}

}  // namespace stepgraph
