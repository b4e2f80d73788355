#include "tests/support/graphs/random_graph.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "engine/base/error.hpp"
#include "tests/support/graphs/random_memory.hpp"

namespace stepgraph::testing {
namespace {

class Builder : private MemoryPlanner {
 public:
  Builder(std::uint64_t seed, const RandomGraphOptions& options) : MemoryPlanner(seed, options) {}

  Graph build() {
    make_buffers();
    make_groups();
    for (std::int64_t n = random_.between(1, 3); n > 0; --n) {
      lane_kinds_.push_back(static_cast<LaneKind>(random_.below(num_lane_kinds)));
    }
    size_                   = static_cast<std::size_t>(random_.between(options_.min_nodes, options_.max_nodes));
    const int communication = static_cast<int>(num_ranks() > 1 ? random_.between(20, 60) : 10);
    while (planned_.size() < size_) {
      if (random_.chance(communication)) {
        plan_event();
      } else {
        plan_compute();
      }
    }
    add_all();
    return graph_;
  }

 private:
  void plan_compute() {
    Planned node = blank(str("n", planned_.size()), any_rank());
    for (std::int64_t i = random_.between(options_.min_accesses, 3); i > 0; --i) {
      const Memory& memory = random_.pick(memory_of(node.rank));
      const Region region  = any_region(memory);
      auto mode            = random_.chance(50)   ? AccessMode::read
                             : random_.chance(70) ? AccessMode::write
                                                  : AccessMode::accumulate;
      if (!allowed(memory, mode, bytes_of(region))) mode = AccessMode::write;
      use(node, memory, mode, region);
    }
    commit({std::move(node)});
  }

  Planned part_of(const std::string& name, Rank rank, const PartSpec& part) {
    Planned node    = blank(name, rank);
    node.spec.part  = part;
    PartSpec& share = *node.spec.part;
    // Fields that the operation does not use may differ.
    const bool permutes = share.op == PartOp::permute;
    if (!reduces(share.op) && random_.chance(20)) share.reduction = pick(random_, all_reductions);
    if (!has_root(share.op) && random_.chance(20)) share.root = any_rank();
    if (!point_to_point(share.op) && !permutes && random_.chance(20)) share.peer = any_rank();
    if (!permutes && random_.chance(20)) share.source = any_rank();
    for (const Memory& memory : memory_of(rank)) {
      if (memory.token && random_.chance(20))
        use(node, memory, static_cast<AccessMode>(random_.below(3)), {.length = 1});
    }
    return node;
  }

  // The bytes of a part: a few elements, or a length that some buffer of the rank is used with.
  std::int64_t any_length(Rank rank, std::int64_t unit, std::int64_t most) {
    const Memory& memory = random_.pick(memory_of(rank));
    if (!memory.habits.empty() && random_.chance(50)) {
      const std::int64_t length = random_.pick(memory.habits).num_bytes();
      if (length % unit == 0) return length;
    }
    return unit * random_.between(0, most);
  }

  // The parts of one collective, or of one send and its receive. Empty if the draw does not fit.
  std::vector<Planned> plan_operation() {
    const Group group      = random_.pick(groups_);
    const RankList members = graph_.spec(group).ranks;
    const std::vector<Rank> ranks(members.begin(), members.end());
    const DType type       = pick(random_, all_types);
    const auto unit        = static_cast<std::int64_t>(size_bytes(type));
    const std::string name = str("p", num_operations_);
    PartSpec part{.group = group, .reduction = pick(random_, all_reductions), .type = type};
    if (random_.chance(50)) part.message = str("message", num_operations_ % 3);
    ++num_operations_;

    std::vector<Planned> parts;
    if (ranks.size() > 1 && random_.chance(35)) {
      std::vector<Rank> ends = ranks;
      random_.shuffle(ends);
      const std::int64_t length = any_length(ends[0], unit, 3);
      part.op = PartOp::send, part.peer = ends[1];
      parts.push_back(part_of(name + " send", ends[0], part));
      if (!use_pieces(parts.back(), AccessMode::read, length)) return {};
      part.op = PartOp::recv, part.peer = ends[0];
      parts.push_back(part_of(name + " recv", ends[1], part));
      if (!use_pieces(parts.back(), AccessMode::write, length)) return {};
      // The reads of a receiver do not matter.
      if (random_.chance(20)) (void)use_bytes(parts.back(), AccessMode::read, 1);
      return parts;
    }
    part.op           = pick(random_, all_collectives);
    part.root         = has_root(part.op) ? random_.pick(ranks) : Rank{-1};
    const Sizes sizes = draw_sizes(ranks, unit);
    std::vector<Rank> targets(ranks.size(), Rank{-1});
    if (part.op == PartOp::permute) targets = draw_targets(ranks);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (part.op == PartOp::permute) {
        const auto source = std::find(targets.begin(), targets.end(), ranks[i]);
        part.peer         = targets[i];
        part.source = source == targets.end() ? Rank{-1} : ranks[static_cast<std::size_t>(source - targets.begin())];
      }
      parts.push_back(part_of(str(name, " ", to_string(part.op)), ranks[i], part));
      if (!use_share(parts.back(), ranks, i, sizes)) return {};
    }
    return parts;
  }

  struct Sizes {
    std::vector<std::int64_t> shards;               // of the members
    std::vector<std::vector<std::int64_t>> slices;  // from each member to each member
  };

  Sizes draw_sizes(const std::vector<Rank>& ranks, std::int64_t unit) {
    Sizes sizes;
    for (const Rank rank : ranks) sizes.shards.push_back(any_length(rank, unit, 2));
    if (random_.chance(50)) sizes.shards.assign(ranks.size(), sizes.shards[0]);
    const bool alike = random_.chance(40), symmetric = random_.chance(50);
    sizes.slices.assign(ranks.size(), std::vector<std::int64_t>(ranks.size(), unit * random_.between(0, 2)));
    for (std::size_t a = 0; a < ranks.size() && !alike; ++a) {
      for (std::size_t b = 0; b < ranks.size(); ++b)
        sizes.slices[a][b] = symmetric && b < a ? sizes.slices[b][a] : unit * random_.between(0, 1);
    }
    return sizes;
  }

  // The target of each member of a permutation: no target twice, no member to itself, some members without one.
  std::vector<Rank> draw_targets(const std::vector<Rank>& ranks) {
    std::vector<Rank> targets = ranks;
    random_.shuffle(targets);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (targets[i] == ranks[i] || random_.chance(15)) targets[i] = Rank{-1};
    }
    return targets;
  }

  // Adds the accesses of member i of a collective. Returns false if there is no place for them.
  bool use_share(Planned& node, const std::vector<Rank>& ranks, std::size_t i, const Sizes& sizes) {
    const PartSpec& part = *node.spec.part;
    const bool is_root   = ranks[i] == part.root;
    const auto& shards   = sizes.shards;
    const auto member    = [&](Rank rank) {
      return static_cast<std::size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
    };
    switch (part.op) {
      case PartOp::all_reduce:
        return send_and_receive(node, shards[0], shards[0]);
      case PartOp::reduce:
        return is_root ? send_and_receive(node, shards[0], shards[0]) : use_pieces(node, AccessMode::read, shards[0]);
      case PartOp::broadcast:
        if (is_root || random_.chance(20)) return send_and_receive(node, shards[0], shards[0]);
        // The reads of members other than the root do not matter.
        return use_pieces(node, AccessMode::write, shards[0]) &&
               (!random_.chance(20) || use_bytes(node, AccessMode::read, 1));
      case PartOp::all_gather:
        return use_whole_and_own(node, AccessMode::write, shards, i);
      case PartOp::gather:
        return is_root ? use_whole_and_own(node, AccessMode::write, shards, i)
                       : use_pieces(node, AccessMode::read, shards[i]);
      case PartOp::reduce_scatter:
        return use_whole_and_own(node, AccessMode::read, shards, i);
      case PartOp::scatter:
        return is_root ? use_whole_and_own(node, AccessMode::read, shards, i)
                       : use_pieces(node, AccessMode::write, shards[i]);
      case PartOp::all_to_all:
        return use_slices(node, sizes.slices, i);
      case PartOp::permute:
        return (index(part.peer) < 0 || use_pieces(node, AccessMode::read, shards[i])) &&
               (index(part.source) < 0 || use_pieces(node, AccessMode::write, shards[member(part.source)]));
      default:
        return true;
    }
  }

  // One operation, or a few that are issued together; none of these may wait for another.
  void plan_event() {
    std::vector<Planned> event = plan_operation();
    if (event.empty()) return;
    for (std::int64_t more = random_.chance(35) ? random_.between(1, 2) : 0; more > 0; --more) {
      const std::vector<Planned> other = plan_operation();
      const bool independent           = std::none_of(other.begin(), other.end(), [&](const Planned& a) {
        return std::any_of(event.begin(), event.end(),
                                     [&](const Planned& b) { return a.rank == b.rank && (conflict(a, b) || same_lane(a, b)); });
      });
      if (independent) event.insert(event.end(), other.begin(), other.end());
    }
    if (planned_.size() + event.size() > size_ + 2) return plan_compute();
    for (Planned& node : event) node.event = num_events_;
    ++num_events_;
    commit(std::move(event));
  }

  void commit(std::vector<Planned> nodes) {
    for (Planned& node : nodes) {
      for (Memory& memory : memory_of(node.rank)) {
        for (const auto& use : node.uses) {
          if (use.buffer == memory.buffer.id) memory.written |= use.written;
        }
      }
      planned_.push_back(std::move(node));
    }
  }

  // The position of each event in a global issue order: any order in which no part waits for a later one.
  std::vector<int> issue_order() {
    const std::size_t n = planned_.size();
    // Vertices: the events, then the plain nodes.
    const auto vertex = [&](std::size_t i) {
      return planned_[i].event >= 0 ? static_cast<std::size_t>(planned_[i].event)
                                    : static_cast<std::size_t>(num_events_) + i;
    };
    std::vector<std::vector<std::size_t>> next(static_cast<std::size_t>(num_events_) + n);
    std::vector<int> waits(next.size());
    for (std::size_t b = 0; b < n; ++b) {
      for (std::size_t a = 0; a < b; ++a) {
        if (planned_[a].rank != planned_[b].rank || vertex(a) == vertex(b)) continue;
        if (!conflict(planned_[a], planned_[b]) && !same_lane(planned_[a], planned_[b])) continue;
        next[vertex(a)].push_back(vertex(b));
        ++waits[vertex(b)];
      }
    }
    const bool as_added = random_.chance(40);
    std::vector<int> order(static_cast<std::size_t>(num_events_));
    std::iota(order.begin(), order.end(), 0);
    if (as_added) return order;
    std::vector<std::size_t> ready;
    for (std::size_t v = 0; v < next.size(); ++v) {
      if (waits[v] == 0) ready.push_back(v);
    }
    int place = 0;
    while (!ready.empty()) {
      std::swap(ready[random_.below(ready.size())], ready.back());
      const std::size_t v = ready.back();
      ready.pop_back();
      if (v < order.size()) order[v] = place++;
      for (const std::size_t w : next[v]) {
        if (--waits[w] == 0) ready.push_back(w);
      }
    }
    return order;
  }

  // Positions are left to the graph if its default (after the parts added before) agrees with the global order.
  void add_all() {
    const std::vector<int> order = issue_order();
    const int by_default         = static_cast<int>(random_.below(3)) * 50;
    const int gap                = by_default == 0 ? static_cast<int>(random_.between(1, 3)) : 1000;
    std::vector<std::vector<int>> position(static_cast<std::size_t>(num_ranks()), std::vector<int>(order.size(), -1));
    for (std::size_t i = 0; i < planned_.size(); ++i) {
      Planned& node = planned_[i];
      if (node.event < 0) {
        graph_.add(node.spec);
        continue;
      }
      const auto event = static_cast<std::size_t>(node.event);
      int& known       = position[static_cast<std::size_t>(index(node.rank))][event];
      if (known < 0 && !(in_place(i, order) && random_.chance(by_default))) known = gap * order[event];
      node.spec.part->issue = known;
      known                 = graph_.part(graph_.add(node.spec)).issue;
    }
  }

  bool in_place(std::size_t i, const std::vector<int>& order) const {
    const auto place = [&](std::size_t k) { return order[static_cast<std::size_t>(planned_[k].event)]; };
    for (std::size_t k = 0; k < planned_.size(); ++k) {
      if (planned_[k].event < 0 || planned_[k].event == planned_[i].event || planned_[k].rank != planned_[i].rank)
        continue;
      if ((k < i) != (place(k) < place(i))) return false;
    }
    return true;
  }

  std::vector<Planned> planned_;
  std::size_t size_   = 0;
  int num_events_     = 0;
  int num_operations_ = 0;
};

}  // namespace

Graph random_graph(std::uint64_t seed, const RandomGraphOptions& options) { return Builder(seed, options).build(); }

}  // namespace stepgraph::testing
