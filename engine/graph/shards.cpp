#include "engine/graph/shards.hpp"

#include <algorithm>
#include <numeric>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

std::int64_t bytes_of(const Graph::PartView& part, Side side) {
  return side == Side::in ? part.bytes_read : part.bytes_written;
}

const char* verb(Side side) { return side == Side::in ? "sends" : "receives"; }

bool is_root(const Graph& graph, Node node, const Graph::PartView& part) {
  return has_root(part.op) && graph.rank(node) == part.root;
}

std::string none_for(const Graph::PartView& part, Side side, const char* subject) {
  if (bytes_of(part, side) == 0) return {};
  return str(subject, " ", verb(side), " ", bytes_of(part, side), " bytes (none)");
}

// The two sides of a part that moves shards: the member's own shard of the side that holds all must have the size of
// the other side.
std::string own_shard(const Graph& graph, Node node, const Graph::PartView& part, Side whole) {
  const auto sizes       = shard_sizes(graph, node, whole);
  const Side single      = whole == Side::in ? Side::out : Side::in;
  const std::int64_t own = (*sizes)[member_of(graph, node)];
  if (own == bytes_of(part, single)) return {};
  return str("it ", verb(single), " ", bytes_of(part, single), " bytes, but its shard of the bytes that it ",
             verb(whole), " has ", own);
}

}  // namespace

bool holds_shards(PartOp op, Side side, bool is_root) noexcept {
  switch (op) {
    case PartOp::all_gather:
      return side == Side::out;
    case PartOp::reduce_scatter:
      return side == Side::in;
    case PartOp::gather:
      return side == Side::out && is_root;
    case PartOp::scatter:
      return side == Side::in && is_root;
    case PartOp::all_to_all:
      return true;
    default:
      return false;
  }
}

std::int64_t ShardSizes::begin(std::size_t member) const {
  if (each_.empty()) return even_ * static_cast<std::int64_t>(member);
  return std::accumulate(each_.begin(), each_.begin() + static_cast<std::ptrdiff_t>(member), std::int64_t{0});
}

bool operator==(const ShardSizes& a, const ShardSizes& b) {
  if (a.num_members_ != b.num_members_) return false;
  if (a.each_.empty() && b.each_.empty()) return a.even_ == b.even_;
  for (std::size_t i = 0; i < a.num_members_; ++i) {
    if (a[i] != b[i]) return false;
  }
  return true;
}

std::optional<ShardSizes> cut_shards(std::span<const std::int64_t> access_bytes, std::size_t num_members, DType type) {
  const auto unit = static_cast<std::int64_t>(size_bytes(type));
  if (access_bytes.size() == num_members) {
    for (const std::int64_t size : access_bytes) {
      if (size % unit != 0) return std::nullopt;
    }
    return ShardSizes(std::vector<std::int64_t>(access_bytes.begin(), access_bytes.end()));
  }
  const std::int64_t total = std::accumulate(access_bytes.begin(), access_bytes.end(), std::int64_t{0});
  if (total % (static_cast<std::int64_t>(num_members) * unit) != 0) return std::nullopt;
  return ShardSizes(num_members, total / static_cast<std::int64_t>(num_members));
}

std::optional<ShardSizes> shard_sizes(const Graph& graph, Node node, Side side) {
  const Graph::PartView part = graph.part(node);
  std::vector<std::int64_t> sizes;
  for (std::size_t i = 0; i < graph.num_accesses(node); ++i) {
    const Graph::AccessView access = graph.access(node, i);
    const bool wanted              = side == Side::in ? reads(access.mode) : writes(access.mode);
    if (wanted && !graph.spec(access.buffer).token) sizes.push_back(access.region.num_bytes());
  }
  return cut_shards(sizes, graph.spec(part.group).ranks.size(), part.type);
}

std::size_t member_of(const Graph& graph, Node part) {
  return static_cast<std::size_t>(member_of(graph.spec(graph.part(part).group), graph.rank(part)));
}

std::string misfit(const Graph& graph, Node node) {
  const Graph::PartView part = graph.part(node);
  if (part.op == PartOp::barrier) return {};
  const bool root = is_root(graph, node, part);
  const auto unit = static_cast<std::int64_t>(size_bytes(part.type));
  for (const Side side : {Side::in, Side::out}) {
    if (side == Side::in && (part.op == PartOp::recv || (part.op == PartOp::broadcast && !root))) continue;
    if (side == Side::out && part.op == PartOp::send) continue;
    const std::int64_t size = bytes_of(part, side);
    if (holds_shards(part.op, side, root)) {
      const std::size_t n = graph.spec(part.group).ranks.size();
      if (!shard_sizes(graph, node, side))
        return str("the ", size, " bytes that it ", verb(side), " are not ", n, " shards of whole ", part.type);
    } else if (size % unit != 0) {
      return str("the ", size, " bytes that it ", verb(side), " are not whole ", part.type);
    }
  }
  const bool even   = part.bytes_read == part.bytes_written;
  const auto uneven = [&](const char* subject) {
    return str(subject, " sends ", part.bytes_read, " bytes, but receives ", part.bytes_written, " (equal sizes)");
  };
  switch (part.op) {
    case PartOp::all_reduce:
      return even ? "" : uneven("it");
    case PartOp::reduce:
      if (!root) return none_for(part, Side::out, "a rank that is not the root");
      return even ? "" : uneven("the root");
    case PartOp::broadcast:
      return even || !root ? "" : uneven("the root");
    case PartOp::all_gather:
      return own_shard(graph, node, part, Side::out);
    case PartOp::reduce_scatter:
      return own_shard(graph, node, part, Side::in);
    case PartOp::gather:
      return root ? own_shard(graph, node, part, Side::out) : none_for(part, Side::out, "a rank that is not the root");
    case PartOp::scatter:
      return root ? own_shard(graph, node, part, Side::in) : none_for(part, Side::in, "a rank that is not the root");
    case PartOp::permute: {
      const std::string sent = part.peer == Rank{-1} ? none_for(part, Side::in, "a rank without a peer") : "";
      if (!sent.empty() || part.source != Rank{-1}) return sent;
      return none_for(part, Side::out, "a rank without a source");
    }
    case PartOp::all_to_all: {
      const std::size_t own   = member_of(graph, node);
      const std::int64_t to   = (*shard_sizes(graph, node, Side::in))[own];
      const std::int64_t from = (*shard_sizes(graph, node, Side::out))[own];
      return to == from ? "" : str("it sends itself ", to, " bytes and receives ", from, " from itself");
    }
    case PartOp::barrier:
    case PartOp::send:
    case PartOp::recv:
      break;
  }
  return {};
}

namespace {

// Each part by itself must have no misfit.
class Meeting {
 public:
  Meeting(const Graph& graph, std::span<const std::uint32_t> nodes)
      : graph_(graph),
        nodes_(nodes),
        op_(part(0).op),
        ranks_(graph.spec(part(0).group).ranks),
        complete_(nodes.size() == ranks_.size()) {}

  std::optional<Misfit> misfit() const {
    switch (op_) {
      case PartOp::all_reduce:
      case PartOp::reduce:
        return all_alike(Side::in);
      case PartOp::broadcast:
        return all_alike(Side::out);
      case PartOp::all_gather:
        return fit_shards(Side::out);
      case PartOp::gather:
        return fit_shards(Side::out);
      case PartOp::reduce_scatter:
      case PartOp::scatter:
        return fit_shards(Side::in);
      case PartOp::all_to_all:
        return fit_slices();
      case PartOp::permute:
        return fit_messages();
      case PartOp::send:
      case PartOp::recv:
        if (nodes_.size() < 2 || part(0).bytes_read == part(1).bytes_written) return std::nullopt;
        return Misfit{{nodes_[1]}, "sizes do not fit"};
      case PartOp::barrier:
        break;
    }
    return std::nullopt;
  }

 private:
  [[nodiscard]] Graph::PartView part(std::size_t i) const { return graph_.part({nodes_[i]}); }
  // The place in the group of the i-th of the nodes.
  [[nodiscard]] std::size_t member(std::size_t i) const { return complete_ ? i : member_of(graph_, {nodes_[i]}); }
  // Which of the nodes is that of a rank; none: it is not in this graph.
  [[nodiscard]] std::optional<std::size_t> find(Rank rank) const {
    const std::size_t place = ranks_.find(rank).value();
    if (complete_) return place;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (graph_.rank({nodes_[i]}) == rank) return i;
    }
    return std::nullopt;
  }

  std::optional<Misfit> all_alike(Side side) const {
    for (std::size_t i = 1; i < nodes_.size(); ++i) {
      if (bytes_of(part(i), side) != bytes_of(part(0), side)) return Misfit{{nodes_[i]}, "sizes do not fit"};
    }
    return std::nullopt;
  }

  // The side that holds all shards defines their sizes.
  std::optional<Misfit> fit_shards(Side whole) const {
    const Side single = whole == Side::in ? Side::out : Side::in;
    std::optional<ShardSizes> first;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (!holds_shards(op_, whole, is_root(graph_, {nodes_[i]}, part(i)))) continue;
      const auto sizes = shard_sizes(graph_, {nodes_[i]}, whole);
      if (first && *first == *sizes) continue;
      for (std::size_t k = 0; k < nodes_.size(); ++k) {
        const std::int64_t size = (*sizes)[member(k)];
        if (size == bytes_of(part(k), single)) continue;
        return Misfit{{nodes_[i]},
                      str("sizes do not fit: it has ", size, " bytes for the shard of rank ", graph_.rank({nodes_[k]}),
                          ", which ", verb(single), " ", bytes_of(part(k), single))};
      }
      if (first)  // they differ in the shard of a member that is not here
        return Misfit{{nodes_[i]}, "sizes do not fit: members have different sizes for the shard of one rank"};
      first = sizes;
    }
    return std::nullopt;
  }

  std::optional<Misfit> fit_slices() const {
    std::vector<ShardSizes> to, from;
    for (const std::uint32_t node : nodes_) {
      to.push_back(*shard_sizes(graph_, {node}, Side::in));
      from.push_back(*shard_sizes(graph_, {node}, Side::out));
    }
    for (std::size_t a = 0; a < nodes_.size(); ++a) {
      for (std::size_t b = 0; b < nodes_.size(); ++b) {
        const std::int64_t sent = to[a][member(b)], received = from[b][member(a)];
        if (sent == received) continue;
        return Misfit{{nodes_[a]},
                      str("sizes do not fit: it sends ", sent, " bytes to rank ", graph_.rank({nodes_[b]}),
                          ", which receives ", received, " from it")};
      }
    }
    return std::nullopt;
  }

  std::optional<Misfit> fit_messages() const {
    for (std::size_t a = 0; a < nodes_.size(); ++a) {
      const Graph::PartView mine = part(a);
      const Rank rank            = graph_.rank({nodes_[a]});
      const auto source          = mine.source != Rank{-1} ? find(mine.source) : std::nullopt;
      if (source && part(*source).peer != rank)
        return Misfit{
            {nodes_[a]},
            str("it expects a message from rank ", mine.source, ", which sends to rank ", part(*source).peer)};
      const auto peer = mine.peer != Rank{-1} ? find(mine.peer) : std::nullopt;
      if (!peer) continue;
      const Graph::PartView theirs = part(*peer);
      if (theirs.source != rank)
        return Misfit{{nodes_[a]},
                      str("it sends to rank ", mine.peer, ", which expects a message from rank ", theirs.source)};
      if (theirs.bytes_written != mine.bytes_read) return Misfit{{nodes_[a]}, "sizes do not fit"};
    }
    return std::nullopt;
  }

  const Graph& graph_;
  std::span<const std::uint32_t> nodes_;
  PartOp op_;
  const RankList& ranks_;  // of the group
  bool complete_;          // all members are here
};

}  // namespace

std::optional<Misfit> misfit(const Graph& graph, std::span<const std::uint32_t> nodes) {
  for (const std::uint32_t node : nodes) {
    if (std::string why = misfit(graph, Node{node}); !why.empty())
      return Misfit{{node}, str("sizes do not fit: ", why)};
  }
  return Meeting(graph, nodes).misfit();
}

}  // namespace stepgraph
