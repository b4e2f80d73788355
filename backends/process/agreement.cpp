#include "backends/process/agreement.hpp"

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "backends/process/message.hpp"
#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "engine/graph/matching.hpp"
#include "engine/graph/shards.hpp"
#include "engine/run/peers.hpp"

namespace stepgraph {
namespace {

std::string subject_of(const GroupSpec& group) {
  return str("group '", group.name, "' of ranks ", join_text(group.ranks, ", ", [](Rank rank) { return str(rank); }));
}

Digest digest_of(const std::string& text) { return sha256(std::as_bytes(std::span(text))); }

Digest digest_of(const std::vector<std::string>& lines) {
  return digest_of(join_text(lines, "\n", [](const std::string& line) { return line; }));
}

std::string to_text(const ShardSizes& sizes) {
  bool even = true;
  for (std::size_t i = 1; i < sizes.size(); ++i) even = even && sizes[i] == sizes[0];
  if (even) return str("shards of ", sizes.size() > 0 ? sizes[0] : 0, " bytes");
  std::vector<std::int64_t> each;
  for (std::size_t i = 0; i < sizes.size(); ++i) each.push_back(sizes[i]);
  return str("shards of ", join_text(each, ", ", [](std::int64_t size) { return str(size); }), " bytes");
}

// Collects the outlines of a graph.
class Outliner {
 public:
  Outliner(const Graph& graph, std::span<const Communicator> groups, bool batches) : graph_(graph), batches_(batches) {
    for (const Communicator& each : groups) {
      const std::string subject = subject_of(each.group);
      groups_[subject]          = out_.size();
      Outline made{.subject = subject + ": collectives", .is_group = true};
      made.id   = digest_of(made.subject);
      made.here = static_cast<std::uint32_t>(graph.ranks().num_in(each.group.ranks));
      made.all  = static_cast<std::uint32_t>(each.group.ranks.size());
      out_.push_back(std::move(made));
    }
  }

  std::vector<Outline> run() {
    const Matching matching = match_parts(graph_);
    for (std::size_t i = 0; i < matching.size(); ++i) {
      const std::span<const std::uint32_t> nodes = matching.meeting(i);
      const Graph::PartView what                 = graph_.part({nodes.front()});
      if (point_to_point(what.op)) {
        add_message({nodes.front()}, what);
      } else {
        add_collective(nodes, what);
      }
    }
    return std::move(out_);
  }

 private:
  const std::string& subject(Group group) {
    const auto [at, is_new] = subjects_.try_emplace(group.id);
    if (is_new) at->second = subject_of(graph_.spec(group));
    return at->second;
  }

  Outline& between(Group group, Rank from, Rank to) {
    const auto [at, is_new] = messages_.try_emplace({group.id, from, to}, out_.size());
    if (!is_new) return out_[at->second];
    Outline made{.subject = str(subject(group), ": messages from rank ", from, " to rank ", to)};
    made.from = from;
    made.to   = to;
    made.id   = digest_of(made.subject);
    made.all  = 2;
    made.here = static_cast<std::uint32_t>(graph_.holds(from)) + static_cast<std::uint32_t>(graph_.holds(to));
    out_.push_back(std::move(made));
    return out_.back();
  }

  void add_message(Node node, const Graph::PartView& what) {
    const Rank mine  = graph_.rank(node);
    const bool sends = what.op == PartOp::send;
    between(what.group, sends ? mine : what.peer, sends ? what.peer : mine)
        .lines.push_back(str("message '", what.message, "' ", what.type, " of ",
                             sends ? what.bytes_read : what.bytes_written, " bytes"));
  }

  void add_collective(std::span<const std::uint32_t> nodes, const Graph::PartView& what) {
    const Node first{nodes.front()};
    std::string text = str(to_string(what.op), " '", what.message, "' ", what.type);
    if (reduces(what.op)) text += str(" ", to_string(what.reduction));
    if (has_root(what.op)) text += str(" root ", what.root);
    switch (what.op) {
      case PartOp::all_reduce:
      case PartOp::reduce:
        text += str(" of ", what.bytes_read, " bytes");
        break;
      case PartOp::broadcast:
        text += str(" of ", what.bytes_written, " bytes");
        break;
      case PartOp::all_gather:
        if (const auto sizes = shard_sizes(graph_, first, Side::out)) text += " of " + to_text(*sizes);
        break;
      case PartOp::reduce_scatter:
        if (const auto sizes = shard_sizes(graph_, first, Side::in)) text += " of " + to_text(*sizes);
        break;
      default:  // each member knows only its own sizes
        for (const std::uint32_t node : nodes) add_pairs({node}, what.group);
        break;
    }
    if (batches_) {
      const auto [at, is_first] = last_issue_.try_emplace(what.group.id, what.issue);
      if (!is_first && std::exchange(at->second, what.issue) == what.issue)
        text += ", issued together with that before";
    }
    out_[groups_.at(subject(what.group))].lines.push_back(std::move(text));
  }

  // The sizes of a member's bytes to and from the others.
  void add_pairs(Node node, Group group) {
    const Graph::PartView part = graph_.part(node);
    const GroupSpec& spec      = graph_.spec(group);
    const Rank mine            = graph_.rank(node);
    const auto moved           = [&](Rank from, Rank to, std::int64_t bytes) {
      // Two members of this process say it once.
      if (from != to && (to == mine || !graph_.holds(to)))
        between(group, from, to).lines.push_back(str(to_string(part.op), " '", part.message, "' of ", bytes, " bytes"));
    };
    const auto shards = [&](Side side, const auto& call) {
      const auto sizes = shard_sizes(graph_, node, side);
      for (std::size_t i = 0; sizes && i < sizes->size(); ++i) call(spec.ranks[i], (*sizes)[i]);
    };
    switch (part.op) {
      case PartOp::scatter:
        if (mine == part.root) {
          shards(Side::in, [&](Rank to, std::int64_t bytes) { moved(mine, to, bytes); });
        } else {
          moved(part.root, mine, part.bytes_written);
        }
        break;
      case PartOp::gather:
        if (mine == part.root) {
          shards(Side::out, [&](Rank from, std::int64_t bytes) { moved(from, mine, bytes); });
        } else {
          moved(mine, part.root, part.bytes_read);
        }
        break;
      case PartOp::all_to_all:
        shards(Side::in, [&](Rank to, std::int64_t bytes) { moved(mine, to, bytes); });
        shards(Side::out, [&](Rank from, std::int64_t bytes) { moved(from, mine, bytes); });
        break;
      case PartOp::permute:
        if (part.peer != Rank{-1}) moved(mine, part.peer, part.bytes_read);
        if (part.source != Rank{-1}) moved(part.source, mine, part.bytes_written);
        break;
      default:  // a barrier moves nothing
        break;
    }
  }

  const Graph& graph_;
  const bool batches_;
  std::map<std::uint32_t, std::int32_t> last_issue_;  // by group: of its last collective
  std::vector<Outline> out_;
  std::map<std::uint32_t, std::string> subjects_;                          // by group: groups can share a name
  std::map<std::string, std::size_t> groups_;                              // place by subject
  std::map<std::tuple<std::uint32_t, Rank, Rank>, std::size_t> messages_;  // place by group, sender and receiver
};

// --- what processes send to process 0 ------------------------------------------------------------------------------

struct Report {
  Digest id, contents;
  bool is_group;
  bool is_empty;  // a group without collectives: only some of its members have messages
  std::uint32_t here, all;
};

Digest read_digest(MessageReader& from) {
  Digest digest;
  std::ranges::copy(from.take(digest.size()), digest.begin());
  return digest;
}

Bytes to_message(const std::vector<Outline>& outlines) {
  MessageWriter to;
  to.number(static_cast<std::uint32_t>(outlines.size()));
  for (const Outline& each : outlines)
    to.raw(each.id)
        .raw(digest_of(each.lines))
        .number(std::uint8_t{each.is_group})
        .number(std::uint8_t{each.lines.empty()})
        .number(each.here)
        .number(each.all);
  return to.bytes();
}

std::vector<Report> read_reports(const Bytes& message) {
  MessageReader from(message);
  std::vector<Report> reports(from.number<std::uint32_t>());
  for (Report& each : reports) {
    each.id       = read_digest(from);
    each.contents = read_digest(from);
    each.is_group = from.number<std::uint8_t>() != 0;
    each.is_empty = from.number<std::uint8_t>() != 0;
    each.here     = from.number<std::uint32_t>();
    each.all      = from.number<std::uint32_t>();
  }
  return reports;
}

// The lines of one subject, from all processes that have it.
Bytes lines_message(const std::vector<Outline>& outlines, const Digest& id) {
  MessageWriter to;
  for (const Outline& each : outlines) {
    if (each.id != id) continue;
    to.text(each.subject).number(each.here).number(each.all).number(static_cast<std::uint32_t>(each.lines.size()));
    for (const std::string& line : each.lines) to.text(line);
  }
  return to.bytes();
}

std::string explain(const std::vector<Bytes>& messages) {
  struct Side {
    std::size_t process;
    std::vector<std::string> lines;
  };
  std::optional<Side> first;
  std::string subject;
  std::uint32_t present = 0, all = 0;
  for (std::size_t process = 0; process < messages.size(); ++process) {
    if (messages[process].empty()) continue;
    MessageReader from(messages[process]);
    subject = from.text();
    present += from.number<std::uint32_t>();
    all = from.number<std::uint32_t>();
    std::vector<std::string> lines(from.number<std::uint32_t>());
    for (std::string& line : lines) line = from.text();
    if (!first) {
      first = Side{process, std::move(lines)};
      continue;
    }
    const auto [mine, other] = std::ranges::mismatch(first->lines, lines);
    if (mine == first->lines.end() && other == lines.end()) continue;
    const auto text = [](const auto& at, const std::vector<std::string>& of) {
      return at == of.end() ? "nothing" : *at;
    };
    return str("programs differ in ", subject, ": operation ", mine - first->lines.begin(), " is ",
               text(mine, first->lines), " in process ", first->process, ", ", text(other, lines), " in process ",
               process);
  }
  return str("programs differ in ", subject, ": ", present, " of ", all, " members have it");
}

}  // namespace

std::vector<Outline> outline(const Graph& graph, std::span<const Communicator> groups, bool batches) {
  return Outliner(graph, groups, batches).run();
}

Agreed Agreement::agree(Peers& peers, const Graph& graph, std::span<const Communicator> groups, bool batches) {
  const std::vector<Outline> outlines = outline(graph, groups, batches);
  const std::vector<Bytes> all        = peers.gather("communicators of a program", to_message(outlines));
  const Bytes answered = peers.broadcast("numbers of communicators", peers.process() == 0 ? answer(all) : Bytes());
  MessageReader from(answered);
  if (from.number<std::uint8_t>() != 0) {
    const std::vector<Bytes> lines = peers.gather("how programs differ", lines_message(outlines, read_digest(from)));
    const Bytes why = peers.broadcast("how programs differ", to_bytes(peers.process() == 0 ? explain(lines) : ""));
    throw Error(ErrorKind::config, to_text(why));
  }

  std::map<Digest, std::size_t> place;  // of the groups of this process
  for (std::size_t i = 0; i < groups.size(); ++i) place[outlines[i].id] = i;
  Agreed agreed;
  agreed.numbers.resize(groups.size());
  for (auto num_groups = from.number<std::uint32_t>(); num_groups > 0; --num_groups) {
    const Digest id       = read_digest(from);
    const auto number     = from.number<std::uint32_t>();
    const bool is_new     = from.number<std::uint8_t>() != 0;
    const bool is_partial = from.number<std::uint8_t>() != 0;
    const auto mine       = place.find(id);
    if (mine != place.end()) agreed.numbers[mine->second] = number;
    if (is_new && is_partial) agreed.connections.partial.push_back(number);
    if (is_new && !is_partial && mine != place.end())
      agreed.connections.groups.push_back({&groups[mine->second].group, number});
  }
  std::ranges::sort(agreed.connections.partial);
  std::ranges::sort(agreed.connections.groups, {}, &NumberedGroup::number);

  std::set<Rank> others;
  for (std::size_t i = 0; i < outlines.size(); ++i) {
    if (outlines[i].is_group && !outlines[i].lines.empty())
      others.insert(groups[i].group.ranks.begin(), groups[i].group.ranks.end());
    if (!outlines[i].is_group) others.insert({outlines[i].from, outlines[i].to});
  }
  for (const Rank rank : others)
    if (!graph.holds(rank)) agreed.connections.peers.push_back(rank);
  return agreed;
}

// Process 0: the number of each group, or a subject that differs.
Bytes Agreement::answer(const std::vector<Bytes>& all) {
  std::map<Digest, Report> seen;
  std::vector<Digest> order;
  std::optional<Digest> differs;
  for (const Bytes& message : all) {
    for (const Report& each : read_reports(message)) {
      const auto [at, is_new] = seen.try_emplace(each.id, each);
      if (is_new) {
        order.push_back(each.id);
        continue;
      }
      at->second.here += each.here;
      if (!differs && at->second.contents != each.contents) differs = each.id;
    }
  }
  for (const auto& [id, each] : seen)
    if (!differs && each.here != each.all && !(each.is_group && each.is_empty)) differs = id;
  MessageWriter to;
  to.number(std::uint8_t{differs.has_value()});
  if (differs) return to.raw(*differs).bytes();
  // Only now: the groups of a program that was refused have no communicators.
  std::set<Digest> fresh;
  for (const Digest& id : order) {
    if (!seen.at(id).is_group) continue;
    if (numbers_.try_emplace(id, static_cast<std::uint32_t>(numbers_.size())).second) fresh.insert(id);
  }
  std::erase_if(seen, [](const auto& each) { return !each.second.is_group; });
  to.number(static_cast<std::uint32_t>(seen.size()));
  for (const auto& [id, each] : seen) {
    to.raw(id).number(numbers_.at(id)).number(std::uint8_t{fresh.contains(id)});
    to.number(std::uint8_t{each.here != each.all});
  }
  return to.bytes();
}

}  // namespace stepgraph
