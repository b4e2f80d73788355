#include "tests/support/oracle/mutation.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "engine/base/error.hpp"
#include "tests/support/enumerators.hpp"

namespace stepgraph::testing {
namespace {

constexpr std::array all_ops{PartOp::all_reduce, PartOp::reduce,  PartOp::all_gather, PartOp::reduce_scatter,
                             PartOp::broadcast,  PartOp::scatter, PartOp::gather,     PartOp::all_to_all,
                             PartOp::permute,    PartOp::barrier, PartOp::send,       PartOp::recv};

template <class T, std::size_t n>
T pick(Random& random, const std::array<T, n>& from) {
  return from[random.below(n)];
}

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

// All absent edges inside a rank that satisfy `wanted`.
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

// Returns false if there is nothing to change.
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

// The declarations of a graph, to rebuild it with a change.
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

// May leave the buffer by one byte, which the graph refuses.
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
    case Mutation::change_buffer:  // usually one that is large enough
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

// Whether the changed property matters for the operation.
bool matters(Mutation mutation, PartOp op) {
  if (mutation == Mutation::change_root) return has_root(op);
  if (mutation == Mutation::change_peer) return point_to_point(op) || op == PartOp::permute;
  if (mutation == Mutation::change_source) return op == PartOp::permute;
  if (mutation == Mutation::change_reduction) return reduces(op);
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
  const auto any_rank         = [&] { return Rank{static_cast<int>(random.between(0, pieces.num_ranks - 1))}; };
  const auto any_rank_or_none = [&] { return random.chance(20) ? Rank{-1} : any_rank(); };
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
      part.peer = any_rank_or_none();
      return true;
    case Mutation::change_source:
      part.source = any_rank_or_none();
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
  // The other mutations need another part of the same rank.
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
  // Half of the time, reordered parts keep the old edges: then the edges of one part apply to the other.
  const bool renumbered = mutation == Mutation::drop_part || (mutation == Mutation::reorder_parts && random.chance(50));
  Edges order           = renumbered ? derive(other) : edges;
  return Mutant{std::move(other), std::move(order)};
}

}  // namespace

std::string_view to_string(Mutation mutation) noexcept {
  constexpr std::array<std::string_view, num_mutations> names{
      "remove_edge",       "redirect_edge",    "add_forward_edge",
      "add_backward_edge", "remove_loop_edge", "redirect_loop_edge",
      "add_loop_edge",     "shift_access",     "resize_access",
      "stride_access",     "resize_part",      "change_mode",
      "change_buffer",     "change_lifetime",  "change_lane",
      "change_op",         "change_type",      "change_root",
      "change_message",    "change_peer",      "change_source",
      "change_reduction",  "change_group",     "swap_issue",
      "change_issue",      "unpart",           "drop_part",
      "reorder_parts"};
  return names[static_cast<std::size_t>(mutation)];
}

std::optional<Mutant> mutate(const Graph& graph, const Edges& edges, Mutation mutation, Random& random) {
  if (mutation <= Mutation::add_loop_edge) return mutate_edges(graph, edges, mutation, random);
  for (int attempt = 0; attempt < 4; ++attempt) {
    auto mutant = mutate_graph(graph, edges, mutation, random);
    if (!mutant || mutant->graph != graph) return mutant;
  }
  return std::nullopt;  // the draws changed nothing
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
                  part.type, " peer ", part.peer, " source ", part.source, " root ", part.root, " '", part.message,
                  "' issue ", part.issue);
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
