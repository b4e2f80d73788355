#include "graphs/collectives/algorithms.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "engine/base/error.hpp"
#include "engine/graph/matching.hpp"
#include "engine/graph/shards.hpp"
#include "engine/simulate/simulate.hpp"
#include "graphs/collectives/emitter.hpp"
#include "graphs/collectives/rounds.hpp"
#include "ops/transfers/collectives.hpp"

namespace stepgraph {
namespace {

constexpr std::array<std::string_view, 5> names{"direct", "ring", "tree", "hierarchical", "adaptive"};

// How many members of the group each node has; none unless they are equally many, and consecutive.
std::optional<int> members_per_node(const RankList& ranks, int ranks_per_node) {
  std::vector<int> sizes;
  std::set<int> seen;
  int last = -1;
  for (const Rank rank : ranks) {
    const int node = index(rank) / ranks_per_node;
    if (node != last && !seen.insert(node).second) return std::nullopt;
    if (node != last) sizes.push_back(0);
    ++sizes.back();
    last = node;
  }
  if (std::adjacent_find(sizes.begin(), sizes.end(), std::not_equal_to<>()) != sizes.end()) return std::nullopt;
  return sizes.front();
}

// What the algorithms need to know of parts that meet; none: some member's shards are not what they need.
class ShapeFinder {
 public:
  ShapeFinder(const Graph& graph, std::span<const std::uint32_t> parts)
      : graph_(graph), parts_(parts), first_(graph.part({parts.front()})) {}

  std::optional<CollectiveShape> find() {
    const RankList& ranks = graph_.spec(first_.group).ranks;
    CollectiveShape shape{.op      = first_.op,
                          .members = static_cast<int>(ranks.size()),
                          .root = static_cast<int>(std::find(ranks.begin(), ranks.end(), first_.root) - ranks.begin()),
                          .element   = static_cast<std::int64_t>(size_bytes(first_.type)),
                          .reduction = first_.reduction,
                          .in_place  = std::vector<char>(ranks.size(), 0)};
    for (const std::uint32_t node : parts_)
      shape.in_place[member_of(graph_, {node})] = is_in_place(graph_, {node}) ? 1 : 0;
    switch (first_.op) {
      case PartOp::all_reduce:
      case PartOp::reduce:
        shape.bytes = first_.bytes_read;
        break;
      case PartOp::broadcast:
        shape.bytes = first_.bytes_written;
        break;
      case PartOp::all_gather:
        if (!all_shards(shape, parts_.front(), Side::out)) return std::nullopt;
        break;
      case PartOp::reduce_scatter:
        if (!all_shards(shape, parts_.front(), Side::in)) return std::nullopt;
        break;
      case PartOp::gather:
      case PartOp::scatter:
      case PartOp::all_to_all:
        if (!even_shards(shape, first_.op == PartOp::gather ? Side::out : Side::in)) return std::nullopt;
        break;
      default:
        break;
    }
    return shape;
  }

 private:
  bool all_shards(CollectiveShape& shape, std::uint32_t node, Side side) const {
    const auto sizes = shard_sizes(graph_, {node}, side);
    if (!sizes) return false;
    for (std::size_t i = 0; i < sizes->size(); ++i) shape.shards.push_back((*sizes)[i]);
    for (const std::int64_t size : shape.shards) shape.bytes += size;
    return true;
  }

  // Where members cannot know each other's shards: all alike, on every member that has them all.
  bool even_shards(CollectiveShape& shape, Side side) const {
    for (const std::uint32_t node : parts_) {
      if (!holds_shards(first_.op, side, graph_.rank({node}) == first_.root)) continue;
      shape.shards.clear();
      shape.bytes = 0;
      if (!all_shards(shape, node, side)) return false;
      if (std::adjacent_find(shape.shards.begin(), shape.shards.end(), std::not_equal_to<>()) != shape.shards.end())
        return false;
    }
    return true;
  }

  const Graph& graph_;
  std::span<const std::uint32_t> parts_;
  Graph::PartView first_;
};

// More than one member, and not yet a matter of messages.
bool is_collective(const Graph& graph, const Graph::PartView& part) {
  return !point_to_point(part.op) && part.op != PartOp::permute && graph.spec(part.group).ranks.size() > 1;
}

// A sum of these may be too large for the type, though the average is not.
bool overflows(const Graph::PartView& part) {
  return reduces(part.op) && part.reduction == Reduction::average &&
         (part.type == DType::u8 || part.type == DType::i32 || part.type == DType::f16);
}

// Members that do not mean the same are not made to look as if they did.
void check_meeting(const Graph& graph, std::span<const std::uint32_t> parts) {
  const auto refuse = [&](Node node, const std::string& why) {
    throw Error(ErrorKind::graph, str("expand: ", graph.describe(Node{parts.front()}), " does not match ",
                                      graph.describe(node), ": ", why, " (verify prints the details)"));
  };
  const Graph::PartView first = graph.part({parts.front()});
  const RankList& members     = graph.spec(first.group).ranks;
  const std::size_t expected  = graph.ranks().num_in(members);
  if (parts.size() != expected) {
    throw Error(ErrorKind::graph,
                str("expand: ", graph.describe(Node{parts.front()}), " has ", parts.size() - 1,
                    " matching parts instead of ", expected - 1, " (verify names the missing ranks)"));
  }
  for (const std::uint32_t node : parts) {
    const Graph::PartView part = graph.part({node});
    if (part.op != first.op || part.type != first.type || (reduces(part.op) && part.reduction != first.reduction) ||
        (has_root(part.op) && part.root != first.root)) {
      refuse({node}, "op, type, reduction or root differ");
    }
    if (const std::string why = misfit(graph, Node{node}); !why.empty()) refuse({node}, why);
  }
  if (const auto wrong = misfit(graph, parts)) refuse(wrong->node, wrong->why);
}

// None: the collective stays as it is.
std::optional<Expansion> expansion_of(const Graph& graph, std::span<const std::uint32_t> parts,
                                      const ExpandOptions& options) {
  const Graph::PartView part = graph.part({parts.front()});
  const GroupSpec& group     = graph.spec(part.group);
  if (!is_collective(graph, part) || overflows(part)) return std::nullopt;
  check_meeting(graph, parts);
  if (part.op == PartOp::barrier) {
    for (const std::uint32_t node : parts) {
      if (!graph.lane(Node{node})) return std::nullopt;
    }
  }
  int per_node = 0;  // 0: a ring
  if (options.algorithm == Algorithm::hierarchical) {
    const auto members = members_per_node(group.ranks, options.ranks_per_node);
    if (!members) return std::nullopt;
    if (*members > 1 && *members < std::ssize(group.ranks)) per_node = *members;
  }
  // Members of these do not know each other's shards.
  const bool complete = parts.size() == group.ranks.size();
  if (!complete && (part.op == PartOp::gather || part.op == PartOp::scatter || part.op == PartOp::all_to_all)) {
    throw Error(ErrorKind::config, str("expand: ", graph.describe(Node{parts.front()}),
                                       " is in a graph of some ranks, but the form of ", to_string(part.op),
                                       " depends on the parts of the other ranks (expand the whole graph, then slice "
                                       "it)"));
  }
  const auto shape = ShapeFinder(graph, parts).find();
  if (!shape) return std::nullopt;
  if (options.algorithm == Algorithm::tree) return Expansion{tree_rounds(*shape), Algorithm::tree};
  if (per_node > 0) return Expansion{hierarchical_rounds(*shape, per_node), Algorithm::hierarchical};
  return Expansion{ring_rounds(*shape), Algorithm::ring};
}

// About how many nodes a part becomes. A ring has a node for each round, and another one if it reduces. An all-reduce
// of few elements has empty segments, which are not sent.
double expanded_nodes(const Graph& graph, Node node, const ExpandOptions& options) {
  const Graph::PartView part = graph.part(node);
  if (options.algorithm == Algorithm::direct || !is_collective(graph, part) || overflows(part)) return 1;
  const auto n              = static_cast<double>(graph.spec(part.group).ranks.size());
  constexpr double own_work = 2;  // a copy and a division
  // A tree has n - 1 edges, each with a send, a receive and perhaps a reduction, upwards, downwards or both.
  const double of_tree   = own_work + (part.op == PartOp::all_to_all ? 3 * std::log2(n) : 5);
  const auto bytes       = static_cast<double>(std::max(part.bytes_read, part.bytes_written));
  const auto ring_rounds = [&](double members) {
    switch (part.op) {
      case PartOp::all_reduce:
        return 3 * (members - 1) * std::min(1.0, bytes / static_cast<double>(size_bytes(part.type)) / n);
      case PartOp::reduce_scatter:
        return 2 * (members - 1);
      case PartOp::broadcast:
      case PartOp::reduce:
        return 3 * std::clamp(bytes / (64 * 1024), 1.0, 2 * members);
      default:
        return members - 1;
    }
  };
  if (options.algorithm == Algorithm::tree) return of_tree;
  const double per_node = options.ranks_per_node;
  if (options.algorithm == Algorithm::hierarchical && per_node > 1 && per_node < n)
    return std::max(of_tree, own_work + ring_rounds(per_node) + ring_rounds(n / per_node));
  return own_work + ring_rounds(n);
}

// Simulates the candidates for each size once.
class Chooser {
 public:
  explicit Chooser(const ExpandOptions& options)
      : machine_(*options.machine), ranks_per_node_(options.ranks_per_node), most_nodes_(options.most_nodes) {}

  Algorithm choose(const Graph& graph, std::span<const std::uint32_t> parts) {
    const Graph::PartView part = graph.part({parts.front()});
    const RankList& ranks      = graph.spec(part.group).ranks;
    if (!is_collective(graph, part)) return Algorithm::direct;
    std::int64_t bytes = 0;
    for (const std::uint32_t node : parts)
      bytes = std::max({bytes, graph.part({node}).bytes_read, graph.part({node}).bytes_written});
    const auto key         = std::tuple(part.op, part.type, part.reduction, part.root, bytes, ranks);
    const auto [at, first] = chosen_.try_emplace(key, Algorithm::direct);
    if (!first) return at->second;
    const Graph alone = rebuild(part, ranks, bytes);
    double best       = simulate(alone, machine_).makespan_s;
    for (const Algorithm algorithm : {Algorithm::ring, Algorithm::tree, Algorithm::hierarchical}) {
      const ExpandOptions options{.algorithm = algorithm, .ranks_per_node = ranks_per_node_};
      if (expanded_nodes(alone, {0}, options) * static_cast<double>(ranks.size()) > most_nodes_) continue;
      if (form_of(alone, {0}, options) != algorithm) continue;
      const double time = simulate(expand_collectives(alone, options), machine_).makespan_s;
      if (time >= best) continue;
      best       = time;
      at->second = algorithm;
    }
    return at->second;
  }

 private:
  // The same collective and nothing else, with even shards.
  [[nodiscard]] Graph rebuild(const Graph::PartView& part, const RankList& ranks, std::int64_t bytes) const {
    Graph graph(machine_.num_ranks());
    const auto n       = static_cast<std::int64_t>(ranks.size());
    const auto element = static_cast<std::int64_t>(size_bytes(part.type));
    const bool whole   = part.op == PartOp::all_reduce || part.op == PartOp::reduce || part.op == PartOp::broadcast;
    const std::int64_t shard = std::max(element, bytes / n / element * element),
                       all   = whole ? std::max(bytes, element) : shard * n;
    const auto buffers       = [&](std::int64_t size) {
      std::map<Rank, Buffer> out;
      for (const Rank rank : ranks)
        out[rank] =
            graph.buffer({.rank = rank, .size_bytes = size, .type = part.type, .lifetime = Lifetime::persistent});
      return out;
    };
    const bool shards_in  = part.op == PartOp::all_gather || part.op == PartOp::gather;
    const bool shards_out = part.op == PartOp::reduce_scatter || part.op == PartOp::scatter;
    auto in = buffers(shards_in ? shard : all), out = buffers(shards_out ? shard : all);
    const Collective spec{.name      = "alone",
                          .group     = graph.group({.name = "members", .ranks = ranks}),
                          .in        = [&](Rank rank) { return AccessList(in[rank]); },
                          .out       = [&](Rank rank) { return AccessList(out[rank]); },
                          .reduction = part.reduction,
                          .root      = part.root};
    switch (part.op) {
      case PartOp::all_reduce:
        all_reduce(graph, {.name = "alone", .group = spec.group, .in = spec.in, .reduction = part.reduction});
        break;
      case PartOp::reduce:
        reduce(graph, spec);
        break;
      case PartOp::all_gather:
        all_gather(graph, spec);
        break;
      case PartOp::reduce_scatter:
        reduce_scatter(graph, spec);
        break;
      case PartOp::broadcast:
        broadcast(graph, spec);
        break;
      case PartOp::scatter:
        scatter(graph, spec);
        break;
      case PartOp::gather:
        gather(graph, spec);
        break;
      case PartOp::all_to_all:
        all_to_all(graph, spec);
        break;
      default:
        barrier(graph, {.name = "alone", .group = spec.group});
    }
    return graph;
  }

  const Machine& machine_;
  int ranks_per_node_;
  double most_nodes_;
  std::map<std::tuple<PartOp, DType, Reduction, Rank, std::int64_t, RankList>, Algorithm> chosen_;
};

void check(const Graph& graph, const ExpandOptions& options) {
  if (options.ranks_per_node < 1)
    throw Error(ErrorKind::config, str("expand: ranks_per_node = ", options.ranks_per_node, " (at least 1)"));
  if (options.algorithm != Algorithm::adaptive) return;
  if (!options.machine)
    throw Error(ErrorKind::config, "expand: adaptive needs a machine to simulate the candidates on (set .machine)");
  if (options.machine->num_ranks() != graph.num_ranks()) {
    throw Error(ErrorKind::config, str("expand: the machine has ", options.machine->num_ranks(),
                                       " ranks, but the graph has ", graph.num_ranks()));
  }
}

}  // namespace

std::string_view to_string(Algorithm algorithm) noexcept { return names[static_cast<std::size_t>(algorithm)]; }

Algorithm parse_algorithm(std::string_view name) {
  const auto at = std::find(names.begin(), names.end(), name);
  if (at != names.end()) return static_cast<Algorithm>(at - names.begin());
  std::string known;
  for (const std::string_view other : names) known += str(known.empty() ? "" : ", ", other);
  throw Error(ErrorKind::config, str("unknown algorithm '", name, "' (known: ", known, ")"));
}

Algorithm form_of(const Graph& graph, Node part, const ExpandOptions& options) {
  check(graph, options);
  if (!graph.has_part(part)) throw Error(ErrorKind::config, str("expand: ", graph.describe(part), " is not a part"));
  const Matching matching = match_parts(graph);
  const auto parts        = matching.meeting(matching.of_node.at(part.id));
  ExpandOptions chosen    = options;
  if (options.algorithm == Algorithm::adaptive) chosen.algorithm = Chooser(options).choose(graph, parts);
  if (chosen.algorithm == Algorithm::direct) return Algorithm::direct;
  const auto expansion = expansion_of(graph, parts, chosen);
  return expansion ? expansion->algorithm : Algorithm::direct;
}

Graph expand_collectives(const Graph& graph, const ExpandOptions& options) {
  check(graph, options);
  if (options.algorithm == Algorithm::direct) return graph;
  const Matching matching = match_parts(graph);
  std::optional<Chooser> chooser;
  if (options.algorithm == Algorithm::adaptive) chooser.emplace(options);
  std::vector<ExpandOptions> chosen(matching.size(), options);
  double nodes = static_cast<double>(graph.num_nodes()) - static_cast<double>(matching.nodes.size());
  for (std::size_t i = 0; i < matching.size(); ++i) {
    const auto parts = matching.meeting(i);
    if (chooser) chosen[i].algorithm = chooser->choose(graph, parts);
    nodes += static_cast<double>(parts.size()) * expanded_nodes(graph, {parts.front()}, chosen[i]);
  }
  if (nodes > options.most_nodes) {
    throw Error(ErrorKind::config,
                str("expand: the algorithm ", options.algorithm, " makes about ", static_cast<std::int64_t>(nodes),
                    " nodes (at most ", static_cast<std::int64_t>(options.most_nodes),
                    "; the algorithm direct or tree, or smaller groups)"));
  }
  std::vector<std::optional<Expansion>> expansions(matching.size());
  for (std::size_t i = 0; i < matching.size(); ++i) {
    if (chosen[i].algorithm != Algorithm::direct) expansions[i] = expansion_of(graph, matching.meeting(i), chosen[i]);
  }
  return emit(graph, matching, expansions);
}

}  // namespace stepgraph
