#include "tests/support/random_graph.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "engine/error.hpp"

namespace stepgraph::testing {
namespace {

// Buffers have at most 64 bytes here, so a set of bytes is a word.
using Bytes = std::uint64_t;

Bytes bytes_of(const Region& region) {
  Bytes bytes = 0;
  for (std::int64_t range = 0; range < region.count; ++range) {
    for (std::int64_t k = 0; k < region.length; ++k) bytes |= Bytes{1} << (region.offset + range * region.stride + k);
  }
  return bytes;
}

constexpr std::array all_types{DType::u8, DType::i32, DType::i64, DType::f16, DType::bf16, DType::f32, DType::f64};
constexpr std::array all_reductions{Reduction::sum, Reduction::average, Reduction::min, Reduction::max,
                                    Reduction::product};
constexpr std::array all_collectives{PartOp::all_reduce, PartOp::all_gather, PartOp::reduce_scatter, PartOp::broadcast,
                                     PartOp::barrier};
constexpr std::array all_ops{PartOp::all_reduce, PartOp::all_gather, PartOp::reduce_scatter,
                             PartOp::broadcast,  PartOp::barrier,    PartOp::send,
                             PartOp::recv};

template <class T, std::size_t n>
T pick(Random& random, const std::array<T, n>& from) {
  return from[random.below(n)];
}

// A node before it is added: what it touches is known as words, its place in the issue order not yet.
struct Planned {
  NodeSpec spec;
  Rank rank{};
  int event = -1;  // parts of one event match, or are issued together
  struct Use {
    std::uint32_t buffer;
    Bytes read, written;
  };
  std::vector<Use> uses = {};
};

bool conflict(const Planned& a, const Planned& b) {
  for (const auto& x : a.uses) {
    for (const auto& y : b.uses) {
      if (x.buffer == y.buffer && ((x.written & (y.read | y.written)) | (x.read & y.written)) != 0) return true;
    }
  }
  return false;
}

bool same_lane(const Planned& a, const Planned& b) { return a.spec.lane && a.spec.lane == b.spec.lane; }

class Builder {
 public:
  Builder(std::uint64_t seed, const RandomGraphOptions& options)
      : random_(seed), options_(options), graph_(draw_num_ranks()) {}

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
  struct Memory {
    Buffer buffer;
    std::int64_t size;
    bool needs_writing;  // before it is read
    bool token;
    bool habitual              = false;  // touched only as in `habits`; else now and then
    std::vector<Region> habits = {};
    Bytes written              = 0;
  };

  // One rank alone has nobody to talk to: less often than the rest.
  int draw_num_ranks() {
    const std::int64_t least = options_.max_ranks > 1 && random_.chance(70) ? 2 : 1;
    return static_cast<int>(random_.between(least, options_.max_ranks));
  }

  [[nodiscard]] int num_ranks() const { return graph_.num_ranks(); }
  [[nodiscard]] Rank any_rank() { return Rank{static_cast<int>(random_.between(0, num_ranks() - 1))}; }
  std::vector<Memory>& memory_of(Rank rank) { return memory_[static_cast<std::size_t>(index(rank))]; }

  void make_buffers() {
    memory_.resize(static_cast<std::size_t>(num_ranks()));
    for (int rank = 0; rank < num_ranks(); ++rank) {
      for (std::int64_t i = random_.between(1, options_.max_buffers_per_rank); i > 0; --i) {
        const std::int64_t size = 8 * random_.between(1, 8);
        const auto lifetime     = random_.chance(50) ? Lifetime::persistent : Lifetime::step;
        const Buffer buffer     = graph_.buffer({.name       = str("b", graph_.num_buffers()),
                                                 .rank       = Rank{rank},
                                                 .size_bytes = size,
                                                 .type       = pick(random_, all_types),
                                                 .lifetime   = lifetime});
        Memory memory{buffer, size, lifetime == Lifetime::step, false};
        give_habits(memory);
        memory_of(Rank{rank}).push_back(std::move(memory));
      }
      if (!random_.chance(40)) continue;
      const Buffer token = graph_.token(Rank{rank}, str("t", graph_.num_buffers()));
      memory_of(Rank{rank}).push_back({token, 1, false, true});
    }
  }

  // Real graphs touch a buffer as a whole, or by the same few pieces over and over.
  void give_habits(Memory& memory) {
    memory.habitual = random_.chance(60);
    if (memory.habitual && random_.chance(50)) {
      memory.habits.push_back({.length = memory.size});
      return;
    }
    for (std::int64_t n = random_.between(1, 3); n > 0; --n) {
      const Region region = free_region(memory.size);
      if (region.num_bytes() > 0) memory.habits.push_back(region);
    }
    memory.habitual = memory.habitual && !memory.habits.empty();
  }

  void make_groups() {
    for (std::int64_t i = random_.between(1, 3); i > 0; --i) {
      std::vector<Rank> ranks;
      for (int rank = 0; rank < num_ranks(); ++rank) ranks.push_back(Rank{rank});
      random_.shuffle(ranks);
      // Groups of one are allowed, but dull.
      const std::int64_t least = num_ranks() > 1 && random_.chance(85) ? 2 : 1;
      ranks.resize(static_cast<std::size_t>(random_.between(least, num_ranks())));
      groups_.push_back(graph_.group({.name = str("g", i), .ranks = ranks}));
    }
  }

  Planned blank(std::string name, Rank rank) {
    Planned node{.spec = {.name = std::move(name)}, .rank = rank};
    if (random_.chance(60)) node.spec.lane = graph_.lane(rank, random_.pick(lane_kinds_));
    node.spec.rank = rank;
    return node;
  }

  Region any_region(const Memory& memory) {
    if (!memory.habits.empty() && (memory.habitual || random_.chance(50))) return random_.pick(memory.habits);
    return free_region(memory.size);
  }

  // Some bytes of a buffer: all, a range, or a strided set.
  Region free_region(std::int64_t size) {
    if (size == 1 || random_.chance(25)) return {.length = size};
    if (random_.chance(3)) return {.offset = random_.between(0, size), .length = 0};
    if (random_.chance(50)) {
      const std::int64_t offset = random_.between(0, size - 1);
      return {.offset = offset, .length = random_.between(1, size - offset)};
    }
    const std::int64_t length = random_.between(1, 3), stride = length + random_.between(0, 4);
    const std::int64_t offset = random_.between(0, std::min(size - length, stride));
    const std::int64_t count  = random_.between(1, (size - offset - length) / stride + 1);
    return {.offset = offset, .length = length, .stride = stride, .count = count};
  }

  // A region of exactly `length` bytes, where one fits.
  std::optional<Region> region_of(const Memory& memory, std::int64_t length) {
    if (!memory.habits.empty() && (memory.habitual || random_.chance(50))) {
      const Region& region = random_.pick(memory.habits);
      if (region.num_bytes() == length) return region;
      if (memory.habitual) return std::nullopt;
    }
    const std::int64_t size = memory.size;
    if (length > size) return std::nullopt;
    const std::int64_t count = random_.between(1, 4);
    if (count > 1 && length % count == 0 && random_.chance(60)) {
      const std::int64_t piece = length / count, slack = (size - length) / (count - 1);
      const std::int64_t stride = piece + random_.between(0, slack);
      const std::int64_t offset = random_.between(0, size - stride * (count - 1) - piece);
      return Region{.offset = offset, .length = piece, .stride = stride, .count = count};
    }
    return Region{.offset = random_.between(0, size - length), .length = length};
  }

  static bool allowed(const Memory& memory, AccessMode mode, Bytes bytes) {
    return !reads(mode) || !memory.needs_writing || (bytes & ~memory.written) == 0;
  }

  static void use(Planned& node, const Memory& memory, AccessMode mode, const Region& region) {
    AccessList& list = mode == AccessMode::read    ? node.spec.reads
                       : mode == AccessMode::write ? node.spec.writes
                                                   : node.spec.accumulates;
    const bool whole = region == Region{.length = memory.size};
    list.push_back(whole ? Access(memory.buffer) : Access(memory.buffer, region));
    const Bytes bytes = bytes_of(region);
    node.uses.push_back({memory.buffer.id, reads(mode) ? bytes : 0, writes(mode) ? bytes : 0});
  }

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

  // Adds an access of exactly `length` bytes; false where the rank has no place for it.
  bool use_bytes(Planned& node, AccessMode mode, std::int64_t length) {
    if (length == 0) return true;
    for (int attempt = 0; attempt < 8; ++attempt) {
      const Memory& memory = random_.pick(memory_of(node.rank));
      if (memory.token) continue;
      const auto region = region_of(memory, length);
      if (!region || !allowed(memory, mode, bytes_of(*region))) continue;
      use(node, memory, mode, *region);
      return true;
    }
    return false;
  }

  // In two pieces, now and then.
  bool use_pieces(Planned& node, AccessMode mode, std::int64_t length) {
    const std::int64_t piece = length > 1 && random_.chance(20) ? random_.between(1, length - 1) : 0;
    return use_bytes(node, mode, piece) && use_bytes(node, mode, length - piece);
  }

  bool send_and_receive(Planned& node, std::int64_t sent, std::int64_t received) {
    if (sent == received && random_.chance(40)) return use_pieces(node, AccessMode::accumulate, sent);
    return use_pieces(node, AccessMode::read, sent) && use_pieces(node, AccessMode::write, received);
  }

  Planned part_of(const std::string& name, Rank rank, const PartSpec& part) {
    Planned node    = blank(name, rank);
    node.spec.part  = part;
    PartSpec& share = *node.spec.part;
    // What the operation does not use may differ.
    const bool reduces = share.op == PartOp::all_reduce || share.op == PartOp::reduce_scatter;
    if (!reduces && random_.chance(20)) share.reduction = pick(random_, all_reductions);
    if (share.op != PartOp::broadcast && random_.chance(20)) share.root = any_rank();
    if (!point_to_point(share.op) && random_.chance(20)) share.peer = any_rank();
    for (const Memory& memory : memory_of(rank)) {
      if (memory.token && random_.chance(20))
        use(node, memory, static_cast<AccessMode>(random_.below(3)), {.length = 1});
    }
    return node;
  }

  // How many bytes a part is about: a few elements, or what some buffer of the rank is used to.
  std::int64_t any_length(Rank rank, std::int64_t unit, std::int64_t most) {
    const Memory& memory = random_.pick(memory_of(rank));
    if (!memory.habits.empty() && random_.chance(50)) {
      const std::int64_t length = random_.pick(memory.habits).num_bytes();
      if (length % unit == 0) return length;
    }
    return unit * random_.between(0, most);
  }

  // The parts of one collective or of one send and its receive; empty when the draw does not fit.
  std::vector<Planned> plan_operation() {
    const Group group             = random_.pick(groups_);
    const std::vector<Rank> ranks = graph_.spec(group).ranks;
    const DType type              = pick(random_, all_types);
    const auto unit               = static_cast<std::int64_t>(size_bytes(type));
    const std::string name        = str("p", num_operations_);
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
      const auto mode = random_.chance(25) ? AccessMode::accumulate : AccessMode::write;
      if (!use_pieces(parts.back(), mode, length)) return {};
      return parts;
    }
    part.op   = pick(random_, all_collectives);
    part.root = part.op == PartOp::broadcast ? random_.pick(ranks) : Rank{-1};
    std::vector<std::int64_t> share;
    for (const Rank rank : ranks) share.push_back(any_length(rank, unit, 2));
    const std::int64_t sum = std::accumulate(share.begin(), share.end(), std::int64_t{0});
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      parts.push_back(part_of(str(name, " ", to_string(part.op)), ranks[i], part));
      Planned& node = parts.back();
      bool fits     = true;
      if (part.op == PartOp::all_reduce) fits = send_and_receive(node, share[0], share[0]);
      if (part.op == PartOp::all_gather) fits = send_and_receive(node, share[i], sum);
      if (part.op == PartOp::reduce_scatter) fits = send_and_receive(node, sum, share[i]);
      if (part.op == PartOp::broadcast) {
        // What other members than the root read is nobody's business.
        const bool is_root = ranks[i] == part.root;
        fits               = send_and_receive(node, is_root ? share[0] : random_.chance(20) ? 1 : 0, share[0]);
      }
      if (!fits) return {};
    }
    return parts;
  }

  // One operation, or a few that are issued together: then none may have to wait for another.
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

  // The place of each event in a global issue order: any order in which no part waits for a later one.
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

  // Positions are left to the graph where its choice (after the parts added before) agrees with the global order.
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

  Random random_;
  RandomGraphOptions options_;
  Graph graph_;
  std::vector<std::vector<Memory>> memory_;  // by rank
  std::vector<Group> groups_;
  std::vector<LaneKind> lane_kinds_;
  std::vector<Planned> planned_;
  std::size_t size_   = 0;
  int num_events_     = 0;
  int num_operations_ = 0;
};

// --- changes -----------------------------------------------------------------------------------------------------

using Rows = std::vector<std::vector<std::uint32_t>>;  // predecessors of each node

Rows unpack(const std::vector<std::uint32_t>& begin, const std::vector<std::uint32_t>& preds) {
  Rows rows;
  for (std::size_t i = 0; i + 1 < begin.size(); ++i)
    rows.emplace_back(preds.begin() + begin[i], preds.begin() + begin[i + 1]);
  return rows;
}

void pack(Rows rows, std::vector<std::uint32_t>& begin, std::vector<std::uint32_t>& preds) {
  begin = {0};
  preds.clear();
  for (auto& row : rows) {
    std::sort(row.begin(), row.end());
    preds.insert(preds.end(), row.begin(), row.end());
    begin.push_back(static_cast<std::uint32_t>(preds.size()));
  }
}

bool contains(const std::vector<std::uint32_t>& row, std::uint32_t node) {
  return std::find(row.begin(), row.end(), node) != row.end();
}

struct Edge {
  std::uint32_t from, to;
};

std::vector<Edge> edges_in(const Rows& rows) {
  std::vector<Edge> edges;
  for (std::uint32_t to = 0; to < rows.size(); ++to) {
    for (const std::uint32_t from : rows[to]) edges.push_back({from, to});
  }
  return edges;
}

// All edges inside a rank that are not there yet and that `wanted` likes.
template <class Wanted>
std::vector<Edge> absent_edges(const Graph& graph, const Rows& rows, Wanted&& wanted) {
  std::vector<Edge> edges;
  for (std::uint32_t from = 0; from < rows.size(); ++from) {
    for (std::uint32_t to = 0; to < rows.size(); ++to) {
      if (graph.rank({from}) == graph.rank({to}) && !contains(rows[to], from) && wanted(Edge{from, to})) {
        edges.push_back({from, to});
      }
    }
  }
  return edges;
}

// False: nothing to change.
bool mutate_rows(const Graph& graph, Rows& rows, Mutation mutation, Random& random) {
  const std::vector<Edge> present = edges_in(rows);
  const auto remove               = [&](Edge edge) { std::erase(rows[edge.to], edge.from); };
  const auto add                  = [&](const std::vector<Edge>& choices) {
    if (choices.empty()) return false;
    const Edge edge = random.pick(choices);
    rows[edge.to].push_back(edge.from);
    return true;
  };
  switch (mutation) {
    case Mutation::add_forward_edge:
      return add(absent_edges(graph, rows, [](Edge edge) { return edge.from < edge.to; }));
    case Mutation::add_backward_edge:  // also from a node to itself
      return add(absent_edges(graph, rows, [](Edge edge) { return edge.from >= edge.to; }));
    case Mutation::add_loop_edge:
      return add(absent_edges(graph, rows, [](Edge) { return true; }));
    default:
      break;
  }
  if (present.empty()) return false;
  const Edge old = random.pick(present);
  if (mutation == Mutation::remove_edge || mutation == Mutation::remove_loop_edge) {
    remove(old);
    return true;
  }
  // Redirect one end.
  const bool other_source = random.chance(50);
  const bool added        = add(absent_edges(graph, rows, [&](Edge edge) {
    return edge.from != edge.to && (other_source ? edge.to == old.to : edge.from == old.from);
  }));
  if (added) remove(old);
  return added;
}

// A graph taken apart, to be put together again with a difference.
struct Pieces {
  int num_ranks;
  std::vector<BufferSpec> buffers = {};
  std::vector<GroupSpec> groups   = {};
  std::vector<NodeSpec> nodes     = {};
};

Pieces take_apart(const Graph& graph) {
  Pieces pieces{.num_ranks = graph.num_ranks()};
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) pieces.buffers.push_back(graph.spec(Buffer{i}));
  for (std::uint32_t i = 0; i < graph.num_groups(); ++i) pieces.groups.push_back(graph.spec(Group{i}));
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) pieces.nodes.push_back(graph.spec(Node{i}));
  return pieces;
}

Graph put_together(const Pieces& pieces) {
  Graph graph(pieces.num_ranks);
  for (const BufferSpec& spec : pieces.buffers) (void)graph.buffer(spec);
  for (const GroupSpec& spec : pieces.groups) (void)graph.group(spec);
  for (const NodeSpec& spec : pieces.nodes) graph.add(spec);
  return graph;
}

struct ModedAccess {
  AccessMode mode;
  Access access;
};

std::vector<ModedAccess> accesses_of(const NodeSpec& spec) {
  std::vector<ModedAccess> accesses;
  for (const Access& access : spec.reads.view()) accesses.push_back({AccessMode::read, access});
  for (const Access& access : spec.writes.view()) accesses.push_back({AccessMode::write, access});
  for (const Access& access : spec.accumulates.view()) accesses.push_back({AccessMode::accumulate, access});
  return accesses;
}

void set_accesses(NodeSpec& spec, const std::vector<ModedAccess>& accesses) {
  spec.reads = spec.writes = spec.accumulates = {};
  for (const auto& [mode, access] : accesses) {
    AccessList& list = mode == AccessMode::read    ? spec.reads
                       : mode == AccessMode::write ? spec.writes
                                                   : spec.accumulates;
    list.push_back(access);
  }
}

// These may leave the buffer by a byte: refused.
void shift(Region& region, std::int64_t size, Random& random) {
  region.offset = random.between(-1, size - (region.end() - region.begin()) + 1);
}

void resize(Region& region, std::int64_t size, Random& random) {
  if (!region.contiguous() && random.chance(50)) {
    region.count += random.chance(50) ? 1 : -1;
  } else if (!region.contiguous()) {
    region.length = random.between(0, region.stride);
  } else {
    region.length = random.between(0, size - region.offset + 1);
  }
}

void change_stride(Region& region, Random& random) {
  if (region.contiguous()) {
    const std::int64_t piece = std::max<std::int64_t>(1, region.length / random.between(2, 4));
    region                   = {.offset = region.offset,
                                .length = piece,
                                .stride = piece + random.between(1, 6),
                                .count  = random.between(2, 4)};
  } else {
    region.stride += random.chance(50) ? 1 : -1;
  }
}

bool mutate_access(Pieces& pieces, Mutation mutation, Random& random) {
  std::vector<std::size_t> choices;
  for (std::size_t i = 0; i < pieces.nodes.size(); ++i) {
    const bool wanted = mutation != Mutation::resize_part || pieces.nodes[i].part;
    if (wanted && !accesses_of(pieces.nodes[i]).empty()) choices.push_back(i);
  }
  if (choices.empty()) return false;
  NodeSpec& node                    = pieces.nodes[random.pick(choices)];
  std::vector<ModedAccess> accesses = accesses_of(node);
  auto& [mode, access]              = accesses[random.below(accesses.size())];
  switch (mutation) {
    case Mutation::shift_access:
      shift(access.region, pieces.buffers[access.buffer.id].size_bytes, random);
      break;
    case Mutation::stride_access:
      change_stride(access.region, random);
      break;
    case Mutation::change_mode:
      mode = static_cast<AccessMode>((static_cast<int>(mode) + random.between(1, 2)) % 3);
      break;
    case Mutation::change_buffer:  // mostly for one that has room for it
      do {
        access.buffer.id = static_cast<std::uint32_t>(random.below(pieces.buffers.size()));
      } while (random.chance(90) && (pieces.buffers[access.buffer.id].rank != *node.rank ||
                                     pieces.buffers[access.buffer.id].size_bytes < access.region.end()));
      break;
    default:
      resize(access.region, pieces.buffers[access.buffer.id].size_bytes, random);
  }
  set_accesses(node, accesses);
  return true;
}

bool mutate_declaration(Pieces& pieces, Mutation mutation, Random& random) {
  if (mutation == Mutation::change_lifetime) {
    BufferSpec& buffer = pieces.buffers[random.below(pieces.buffers.size())];
    buffer.lifetime    = buffer.lifetime == Lifetime::step ? Lifetime::persistent : Lifetime::step;
    return true;
  }
  NodeSpec& node = pieces.nodes[random.below(pieces.nodes.size())];
  node.lane.reset();
  if (random.chance(75)) node.lane = Lane{*node.rank, static_cast<LaneKind>(random.below(num_lane_kinds))};
  return true;
}

// Whether the operation looks at what is changed.
bool matters(Mutation mutation, PartOp op) {
  if (mutation == Mutation::change_root) return op == PartOp::broadcast;
  if (mutation == Mutation::change_peer) return point_to_point(op);
  if (mutation == Mutation::change_reduction) return op == PartOp::all_reduce || op == PartOp::reduce_scatter;
  return true;
}

bool mutate_part(Pieces& pieces, Mutation mutation, Random& random) {
  std::vector<std::size_t> choices, telling;
  for (std::size_t i = 0; i < pieces.nodes.size(); ++i) {
    if (!pieces.nodes[i].part) continue;
    choices.push_back(i);
    if (matters(mutation, pieces.nodes[i].part->op)) telling.push_back(i);
  }
  if (choices.empty()) return false;
  const std::size_t chosen = random.pick(!telling.empty() && random.chance(75) ? telling : choices);
  NodeSpec& node           = pieces.nodes[chosen];
  PartSpec& part           = *node.part;
  std::erase_if(choices, [&](std::size_t i) { return i == chosen || pieces.nodes[i].rank != node.rank; });
  const auto any_rank = [&] { return Rank{static_cast<int>(random.between(0, pieces.num_ranks - 1))}; };
  switch (mutation) {
    case Mutation::change_op:
      part.op = pick(random, all_ops);
      return true;
    case Mutation::change_type:
      part.type = pick(random, all_types);
      return true;
    case Mutation::change_root:
      part.root = any_rank();
      return true;
    case Mutation::change_message:
      part.message = random.chance(30) ? "" : str("message", random.between(0, 2));
      return true;
    case Mutation::change_peer:
      part.peer = any_rank();
      return true;
    case Mutation::change_reduction:
      part.reduction = pick(random, all_reductions);
      return true;
    case Mutation::change_group:
      part.group.id = static_cast<std::uint32_t>(random.below(pieces.groups.size()));
      return true;
    case Mutation::unpart:
      node.part.reset();
      return true;
    case Mutation::drop_part:
      pieces.nodes.erase(pieces.nodes.begin() + static_cast<std::ptrdiff_t>(chosen));
      return true;
    default:
      break;
  }
  // The rest needs another part of the same rank.
  if (choices.empty()) return false;
  NodeSpec& other = pieces.nodes[random.pick(choices)];
  if (mutation == Mutation::swap_issue) {
    std::swap(part.issue, other.part->issue);
  } else if (mutation == Mutation::change_issue) {
    part.issue = std::max(0, other.part->issue + static_cast<int>(random.between(-1, 1)));
  } else {
    std::swap(node, other);
  }
  return true;
}

std::optional<Mutant> mutate_edges(const Graph& graph, const Edges& edges, Mutation mutation, Random& random) {
  const bool loop = mutation >= Mutation::remove_loop_edge;
  Edges changed   = edges;
  auto& begin     = loop ? changed.loop_begin : changed.pred_begin;
  auto& preds     = loop ? changed.loop_preds : changed.preds;
  Rows rows       = unpack(begin, preds);
  if (!mutate_rows(graph, rows, mutation, random)) return std::nullopt;
  pack(std::move(rows), begin, preds);
  return Mutant{graph, std::move(changed)};
}

std::optional<Mutant> mutate_graph(const Graph& graph, const Edges& edges, Mutation mutation, Random& random) {
  Pieces pieces = take_apart(graph);
  bool changed  = false;
  if (mutation <= Mutation::resize_part || mutation == Mutation::change_mode || mutation == Mutation::change_buffer) {
    changed = mutate_access(pieces, mutation, random);
  } else if (mutation <= Mutation::change_lane) {
    changed = mutate_declaration(pieces, mutation, random);
  } else {
    changed = mutate_part(pieces, mutation, random);
  }
  if (!changed) return std::nullopt;
  Graph other = put_together(pieces);
  // Parts that changed places keep the old edges half of the time: then those of one part bind the other.
  const bool renumbered = mutation == Mutation::drop_part || (mutation == Mutation::reorder_parts && random.chance(50));
  Edges order           = renumbered ? derive(other) : edges;
  return Mutant{std::move(other), std::move(order)};
}

}  // namespace

Graph random_graph(std::uint64_t seed, const RandomGraphOptions& options) { return Builder(seed, options).build(); }

std::string_view to_string(Mutation mutation) noexcept {
  constexpr std::array<std::string_view, num_mutations> names{
      "remove_edge",        "redirect_edge", "add_forward_edge", "add_backward_edge", "remove_loop_edge",
      "redirect_loop_edge", "add_loop_edge", "shift_access",     "resize_access",     "stride_access",
      "resize_part",        "change_mode",   "change_buffer",    "change_lifetime",   "change_lane",
      "change_op",          "change_type",   "change_root",      "change_message",    "change_peer",
      "change_reduction",   "change_group",  "swap_issue",       "change_issue",      "unpart",
      "drop_part",          "reorder_parts"};
  return names[static_cast<std::size_t>(mutation)];
}

std::optional<Mutant> mutate(const Graph& graph, const Edges& edges, Mutation mutation, Random& random) {
  if (mutation <= Mutation::add_loop_edge) return mutate_edges(graph, edges, mutation, random);
  for (int attempt = 0; attempt < 4; ++attempt) {
    auto mutant = mutate_graph(graph, edges, mutation, random);
    if (!mutant || mutant->graph != graph) return mutant;
  }
  return std::nullopt;  // only found what was there already
}

Edges with_implied_edges(const Graph& graph, const Edges& edges, Random& random) {
  const std::size_t n = graph.num_nodes();
  Rows rows = unpack(edges.pred_begin, edges.preds), loop_rows = unpack(edges.loop_begin, edges.loop_preds);
  // Two runs in one table: node i of the next run is n + i.
  std::vector<std::vector<bool>> reaches(2 * n, std::vector<bool>(2 * n));
  for (const Edge edge : edges_in(rows)) reaches[edge.from][edge.to] = reaches[n + edge.from][n + edge.to] = true;
  for (const Edge edge : edges_in(loop_rows)) reaches[edge.from][n + edge.to] = true;
  for (std::size_t via = 0; via < 2 * n; ++via) {
    for (std::size_t from = 0; from < 2 * n; ++from) {
      for (std::size_t to = 0; to < 2 * n; ++to) {
        if (reaches[from][via] && reaches[via][to]) reaches[from][to] = true;
      }
    }
  }
  for (std::uint32_t from = 0; from < n; ++from) {
    for (std::uint32_t to = 0; to < n; ++to) {
      if (reaches[from][to] && !contains(rows[to], from) && random.chance(60)) rows[to].push_back(from);
      if (reaches[from][n + to] && !contains(loop_rows[to], from) && random.chance(60)) loop_rows[to].push_back(from);
    }
  }
  Edges more = edges;
  pack(std::move(rows), more.pred_begin, more.preds);
  pack(std::move(loop_rows), more.loop_begin, more.loop_preds);
  return more;
}

std::string dump(const Graph& graph, const Edges& edges) {
  std::string text = str(graph.num_ranks(), " ranks\n");
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& spec = graph.spec(Buffer{i});
    text += str("  ", graph.describe(Buffer{i}), " rank ", spec.rank, " ", spec.size_bytes, " bytes ",
                to_string(spec.lifetime), "\n");
  }
  for (std::uint32_t i = 0; i < graph.num_groups(); ++i) {
    text += str("  group ", i, ":");
    for (const Rank rank : graph.spec(Group{i}).ranks) text += str(" ", rank);
    text += "\n";
  }
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    const Node node{i};
    text += str("  #", i, " ", graph.describe(node));
    for (std::size_t k = 0; k < graph.num_accesses(node); ++k) {
      const auto [buffer, mode, region] = graph.access(node, k);
      text += str(" ", to_string(mode), " ", graph.spec(buffer).name, to_string(region), ";");
    }
    if (graph.has_part(node)) {
      const auto part = graph.part(node);
      text += str(" part: ", to_string(part.op), " group ", part.group.id, " ", to_string(part.reduction), " ",
                  part.type, " peer ", part.peer, " root ", part.root, " '", part.message, "' issue ", part.issue);
    }
    const auto list = [&](std::string_view what, const auto& begin, const auto& preds) {
      if (begin[i] == begin[i + 1]) return;
      text += str(" ", what);
      for (auto k = begin[i]; k < begin[i + 1]; ++k) text += str(" #", preds[k]);
    };
    list("after", edges.pred_begin, edges.preds);
    list("after the last run's", edges.loop_begin, edges.loop_preds);
    text += "\n";
  }
  return text;
}

}  // namespace stepgraph::testing
