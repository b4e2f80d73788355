#include "engine/simulate/traffic.hpp"

#include <algorithm>
#include <cmath>

#include "engine/graph/graph_data.hpp"
#include "engine/graph/shards.hpp"

namespace stepgraph::simulator {
namespace {

// The bytes that members declare, with assumptions for members whose parts are not in this graph.
class Declared {
 public:
  Declared(const Graph& graph, std::span<const std::uint32_t> parts) {
    const GraphData& data = graph.data();
    first_                = &data.parts[static_cast<std::size_t>(data.nodes[parts.front()].part)];
    const Rank first_rank = Rank{data.nodes[parts.front()].rank};
    if (first_->op == PartOp::send) {
      members = RankList{first_rank, first_->peer};
    } else if (first_->op == PartOp::recv) {
      members = RankList{first_->peer, first_rank};
    } else {
      members = data.groups[first_->group].ranks;
    }
    parts_.assign(members.size(), nullptr);
    for (const std::uint32_t node : parts) {
      const auto at = members.find(Rank{data.nodes[node].rank});
      if (at) parts_[*at] = &data.parts[static_cast<std::size_t>(data.nodes[node].part)];
    }
  }

  [[nodiscard]] PartOp op() const { return first_->op; }
  [[nodiscard]] std::size_t member(Rank rank) const { return members.find(rank).value_or(members.size()); }
  [[nodiscard]] std::size_t root() const { return member(first_->root); }

  // The largest size that any part reads or writes: the whole tensor of an operation whose members hold shards.
  [[nodiscard]] double whole() const {
    double most = 0;
    for (const PartRecord* part : parts_) {
      if (part)
        most = std::max({most, static_cast<double>(part->bytes_read), static_cast<double>(part->bytes_written)});
    }
    return most;
  }
  // Each member's bytes as its part declares them. Members without a part get equal shares of the rest of the whole.
  template <class Bytes>
  [[nodiscard]] std::vector<double> shards(const Bytes& bytes) const {
    double known     = 0;
    std::size_t here = 0;
    for (const PartRecord* part : parts_) {
      if (!part) continue;
      known += static_cast<double>(bytes(*part));
      ++here;
    }
    const std::size_t elsewhere = members.size() - here;
    const double share          = elsewhere ? std::max(0.0, whole() - known) / static_cast<double>(elsewhere) : 0;
    std::vector<double> out;
    for (const PartRecord* part : parts_) out.push_back(part ? static_cast<double>(bytes(*part)) : share);
    return out;
  }

  // One pair per slice. A member without a part is assumed to send equal slices to all others.
  void exchange(const Graph& graph, std::vector<Traffic::Pair>& pairs) const {
    const double even = whole() / static_cast<double>(members.size());
    for (std::size_t from = 0; from < members.size(); ++from) {
      const auto slices = parts_[from] ? shard_sizes(graph, {parts_[from]->node}, Side::in) : std::nullopt;
      for (std::size_t to = 0; to < members.size(); ++to) {
        if (to != from) pairs.push_back({from, to, slices ? static_cast<double>((*slices)[to]) : even});
      }
    }
  }

  // Adds each message once, even if only one of its ends is in this graph.
  void permute(std::vector<Traffic::Pair>& pairs) const {
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (!parts_[i]) continue;
      const std::size_t to = member(parts_[i]->peer), from = member(parts_[i]->source);
      if (to < members.size()) pairs.push_back({i, to, static_cast<double>(parts_[i]->bytes_read)});
      if (from < members.size() && !parts_[from])
        pairs.push_back({from, i, static_cast<double>(parts_[i]->bytes_written)});
    }
  }

  RankList members;

 private:
  std::vector<const PartRecord*> parts_;  // by member; null: not in this graph
  const PartRecord* first_ = nullptr;
};

}  // namespace

Traffic traffic_of(const Graph& graph, std::span<const std::uint32_t> parts) {
  const Declared declared(graph, parts);
  const std::size_t num_members = declared.members.size();
  const auto n                  = static_cast<double>(num_members);
  const std::vector<double> all_members(num_members, 1), no_member(num_members, 0);
  const auto only = [&](std::size_t member) {
    std::vector<double> out(num_members);
    if (member < num_members) out[member] = 1;
    return out;
  };
  Traffic out{.members = declared.members, .sends = all_members, .takes = all_members, .pairs = {}};
  out.rounds   = 1;
  out.messages = n - 1;
  switch (declared.op()) {
    case PartOp::all_reduce:  // each member reduces its share of all inputs, then sends the sum back
      out.bytes    = 2 * declared.whole() / n;
      out.rounds   = 2;
      out.messages = 2 * (n - 1);
      break;
    case PartOp::all_gather:
      out.bytes = 1;
      out.sends = declared.shards([](const PartRecord& part) { return part.bytes_read; });
      break;
    case PartOp::reduce_scatter:
      out.bytes = 1;
      out.takes = declared.shards([](const PartRecord& part) { return part.bytes_written; });
      break;
    case PartOp::broadcast:
      out.bytes = declared.whole();
      out.sends = only(declared.root());
      break;
    case PartOp::reduce:
      out.bytes = declared.whole();
      out.takes = only(declared.root());
      break;
    case PartOp::gather:
      out.bytes = 1;
      out.sends = declared.shards([](const PartRecord& part) { return part.bytes_read; });
      out.takes = only(declared.root());
      break;
    case PartOp::scatter:
      out.bytes = 1;
      out.sends = only(declared.root());
      out.takes = declared.shards([](const PartRecord& part) { return part.bytes_written; });
      break;
    case PartOp::all_to_all:
      declared.exchange(graph, out.pairs);
      out.sends = out.takes = no_member;
      break;
    case PartOp::permute:
      declared.permute(out.pairs);
      out.sends = out.takes = no_member;
      out.rounds = out.messages = out.pairs.empty() ? 0 : 1;
      break;
    case PartOp::barrier:
      out.rounds   = 2;
      out.messages = 2 * (n - 1);
      break;
    case PartOp::send:
    case PartOp::recv:
      out.bytes = declared.whole();
      out.sends = only(0);
      out.takes = only(1);
      break;
  }
  return out;
}

Network::Network(const Machine& machine, std::uint32_t first_resource)
    : tree_(machine.network()), first_resource_(first_resource), below_(tree_.size()) {}

void Network::touch(const RankList& members) {
  for (const Rank rank : members) {
    for (std::int32_t at = index(rank); at >= 0; at = tree_[static_cast<std::size_t>(at)].above) {
      Below& below = below_[static_cast<std::size_t>(at)];
      if (below.touched) break;
      below.touched = true;
      touched_.push_back(at);
    }
  }
  const auto depth = [&](std::int32_t at) { return tree_[static_cast<std::size_t>(at)].depth; };
  std::sort(touched_.begin(), touched_.end(),
            [&](std::int32_t a, std::int32_t b) { return std::pair(-depth(a), a) < std::pair(-depth(b), b); });
}

void Network::forget() {
  for (const std::int32_t at : touched_) below_[static_cast<std::size_t>(at)] = {};
  touched_.clear();
}

// Calls visit(vertex, its Below, whether it is the uplink) for each link on the route of a pair: from both ends up to
// the vertex where they meet.
template <class Visit>
void Network::walk(const Traffic::Pair& pair, const Traffic& traffic, const Visit& visit) {
  auto from = static_cast<std::size_t>(index(traffic.members[pair.from]));
  auto to   = static_cast<std::size_t>(index(traffic.members[pair.to]));
  while (from != to) {
    const bool is_up   = tree_[from].depth >= tree_[to].depth;
    std::size_t& lower = is_up ? from : to;
    visit(tree_[lower], below_[lower], is_up);
    lower = static_cast<std::size_t>(tree_[lower].above);
  }
}

double Network::largest_latency(const Traffic& traffic) {
  touch(traffic.members);
  for (std::size_t i = 0; i < traffic.members.size(); ++i) {
    Below& leaf       = below_[static_cast<std::size_t>(index(traffic.members[i]))];
    leaf.latency_up   = traffic.sends[i] > 0 ? 0 : -1;
    leaf.latency_down = traffic.takes[i] > 0 ? 0 : -1;
  }
  // A route turns at the one vertex where its two ends arrive from different sides.
  double largest = 0;
  for (const std::int32_t at : touched_) {
    const Machine::Vertex& vertex = tree_[static_cast<std::size_t>(at)];
    if (vertex.above < 0) continue;
    const Below& below = below_[static_cast<std::size_t>(at)];
    Below& above       = below_[static_cast<std::size_t>(vertex.above)];
    const double up    = below.latency_up < 0 ? -1 : below.latency_up + vertex.up.latency_s;
    const double down  = below.latency_down < 0 ? -1 : below.latency_down + vertex.down.latency_s;
    if (up >= 0 && above.latency_down >= 0) largest = std::max(largest, up + above.latency_down);
    if (down >= 0 && above.latency_up >= 0) largest = std::max(largest, above.latency_up + down);
    above.latency_up   = std::max(above.latency_up, up);
    above.latency_down = std::max(above.latency_down, down);
  }
  for (const Traffic::Pair& pair : traffic.pairs) {
    double up = 0, down = 0;
    walk(pair, traffic, [&](const Machine::Vertex& vertex, Below&, bool is_up) {
      (is_up ? up : down) += is_up ? vertex.up.latency_s : vertex.down.latency_s;
    });
    largest = std::max(largest, up + down);
  }
  forget();
  return largest;
}

void Network::add_demands(const Traffic& traffic, std::vector<Demand>& out) {
  touch(traffic.members);
  double sends = 0, takes = 0;
  for (std::size_t i = 0; i < traffic.members.size(); ++i) {
    Below& leaf         = below_[static_cast<std::size_t>(index(traffic.members[i]))];
    sends += leaf.sends = traffic.sends[i];
    takes += leaf.takes = traffic.takes[i];
    leaf.num_members    = 1;
  }
  for (const Traffic::Pair& pair : traffic.pairs) {
    walk(pair, traffic, [&](const Machine::Vertex&, Below& below, bool is_up) {
      (is_up ? below.paired_up : below.paired_down) += pair.bytes;
    });
  }
  for (const std::int32_t at : touched_) {
    const Machine::Vertex& vertex = tree_[static_cast<std::size_t>(at)];
    if (vertex.above < 0) continue;
    const Below& below = below_[static_cast<std::size_t>(at)];
    Below& above       = below_[static_cast<std::size_t>(vertex.above)];
    above.sends += below.sends;
    above.takes += below.takes;
    above.num_members += below.num_members;
    if (below.num_members == traffic.members.size()) break;  // no traffic leaves: differences are only rounding
    const auto add = [&](const Link& link, std::uint32_t offset, double bytes) {
      if (bytes > 0 && std::isfinite(link.bytes_per_s))
        out.push_back({first_resource_ + 2 * static_cast<std::uint32_t>(at) + offset, bytes});
    };
    add(vertex.up, 0, traffic.bytes * below.sends * (takes - below.takes) + below.paired_up);
    add(vertex.down, 1, traffic.bytes * (sends - below.sends) * below.takes + below.paired_down);
  }
  forget();
}

}  // namespace stepgraph::simulator
