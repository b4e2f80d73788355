#include "ops/transfers/collectives.hpp"

#include <algorithm>
#include <numeric>

#include "engine/base/error.hpp"
#include "engine/graph/shards.hpp"
#include "ops/tape/streams.hpp"

namespace stepgraph {
namespace {

std::vector<std::int64_t> sizes_of(const Graph& graph, const NodeSpec& node, Side side) {
  std::vector<std::int64_t> sizes;
  for (const AccessList* list : {side == Side::in ? &node.reads : &node.writes, &node.accumulates}) {
    for (const Access& access : list->view()) sizes.push_back(num_bytes(graph, access));
  }
  return sizes;
}

// The element type of a part: as given, else the type of the buffers it accesses.
DType element_type(const Graph& graph, const NodeSpec& node, std::optional<DType> given) {
  if (given) return *given;
  for (const AccessList* list : {&node.reads, &node.accumulates, &node.writes}) {
    for (const Access& access : list->view()) return graph.spec(access.buffer).type;
  }
  return DType::u8;
}

[[noreturn]] void refuse(const std::string& name, PartOp op, const std::string& why) {
  throw Error(ErrorKind::config, str("ops: ", to_string(op), " '", name, "' ", why));
}

void need(const Collective& spec, PartOp op, bool given, const char* what) {
  if (!given) refuse(spec.name, op, str("needs `", what, "`"));
}

// The bytes that a member's part sends to others.
double bytes_sent(const Graph& graph, const NodeSpec& node, std::size_t member) {
  const PartSpec& part = *node.part;
  const auto n         = graph.spec(part.group).ranks.size();
  const auto sizes     = sizes_of(graph, node, Side::in);
  const auto all       = static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
  const bool is_root   = graph.spec(part.group).ranks[member] == part.root;
  const auto to_others = [&] {  // a shard each
    const auto shards = cut_shards(sizes, n, part.type);
    return shards ? all - static_cast<double>((*shards)[member]) : all;  // cannot be cut: verify reports it
  };
  switch (part.op) {
    case PartOp::all_reduce:
    case PartOp::all_gather:
      return all * static_cast<double>(n - 1);
    case PartOp::broadcast:
      return is_root ? all * static_cast<double>(n - 1) : 0;
    case PartOp::reduce:
    case PartOp::gather:
      return is_root ? 0 : all;
    case PartOp::scatter:
      return is_root ? to_others() : 0;
    case PartOp::reduce_scatter:
    case PartOp::all_to_all:
      return to_others();
    case PartOp::permute:
    case PartOp::send:
      return all;
    case PartOp::barrier:
    case PartOp::recv:
      break;
  }
  return 0;
}

void set_costs(const Graph& graph, NodeSpec& node, std::size_t member) {
  node.cost.bytes_sent = bytes_sent(graph, node, member);
  for (const Side side : {Side::in, Side::out}) {
    for (const std::int64_t size : sizes_of(graph, node, side)) node.cost.bytes_moved += static_cast<double>(size);
  }
}

// A member's own shard of accesses that hold the shards of all members.
AccessList own_shard(const Graph& graph, const Collective& spec, PartOp op, const AccessList& all, std::size_t member) {
  const std::size_t n                    = graph.spec(spec.group).ranks.size();
  const std::span<const Access> accesses = all.view();
  if (accesses.size() == n) return accesses[member];
  const bool one_range =
      accesses.size() == 1 && (accesses[0].region.length == Access::whole || accesses[0].region.count == 1);
  if (!one_range)
    refuse(spec.name, op,
           "is in place, but a shard is not one access (give it `in` and `out`, or an access per member)");
  const std::int64_t total = num_bytes(graph, accesses[0]), size = total / static_cast<std::int64_t>(n);
  const std::int64_t begin = accesses[0].region.length == Access::whole ? 0 : accesses[0].region.offset;
  return accesses[0].buffer.range(begin + static_cast<std::int64_t>(member) * size, size);
}

void set_accesses(const Graph& graph, NodeSpec& node, const Collective& spec, PartOp op, std::size_t member) {
  const Rank rank    = graph.spec(spec.group).ranks[member];
  const bool is_root = rank == spec.root;
  bool reads = static_cast<bool>(spec.in), writes = static_cast<bool>(spec.out);
  if (op == PartOp::scatter || op == PartOp::broadcast) reads &= is_root;
  if (op == PartOp::gather || op == PartOp::reduce) writes &= is_root;
  if (op == PartOp::permute) {
    reads &= node.part->peer != Rank{-1};
    writes &= node.part->source != Rank{-1};
  }
  const bool in_place = !spec.in || !spec.out;
  if (in_place && (op == PartOp::all_reduce || op == PartOp::all_to_all || (op == PartOp::reduce && is_root))) {
    node.accumulates = spec.in(rank);
  } else if (in_place && op == PartOp::broadcast && is_root) {
    node.accumulates = spec.out(rank);
  } else {
    if (reads) node.reads = spec.in(rank);
    if (writes) node.writes = spec.out(rank);
    if (in_place && op == PartOp::all_gather) node.reads = own_shard(graph, spec, op, node.writes, member);
    if (in_place && op == PartOp::reduce_scatter) node.writes = own_shard(graph, spec, op, node.reads, member);
  }
}

std::vector<Node> add_parts(Graph& graph, const Collective& spec, PartOp op) {
  std::vector<Node> nodes;
  const RankList ranks = graph.spec(spec.group).ranks;
  std::vector<Rank> sources(ranks.size(), Rank{-1});
  for (std::size_t i = 0; i < ranks.size() && op == PartOp::permute; ++i) {
    const auto peer = std::find(ranks.begin(), ranks.end(), spec.peer(ranks[i]));
    if (peer != ranks.end()) sources[static_cast<std::size_t>(peer - ranks.begin())] = ranks[i];
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (!graph.holds(ranks[i])) continue;
    NodeSpec node{.name   = spec.name,
                  .lane   = graph.lane(ranks[i], spec.lane),
                  .part   = PartSpec{.group     = spec.group,
                                     .op        = op,
                                     .reduction = spec.reduction,
                                     .peer      = op == PartOp::permute ? spec.peer(ranks[i]) : Rank{-1},
                                     .source    = sources[i],
                                     .root      = spec.root,
                                     .message   = spec.name},
                  .op     = std::string(to_string(op)),
                  .labels = spec.labels};
    set_accesses(graph, node, spec, op, i);
    node.part->type = element_type(graph, node, spec.type);
    set_costs(graph, node, i);
    nodes.push_back(graph.add(node));
  }
  return nodes;
}

}  // namespace

std::vector<Node> all_reduce(Graph& graph, const Collective& spec) {
  need(spec, PartOp::all_reduce, static_cast<bool>(spec.in), "in");
  return add_parts(graph, spec, PartOp::all_reduce);
}

std::vector<Node> reduce(Graph& graph, const Collective& spec) {
  need(spec, PartOp::reduce, static_cast<bool>(spec.in), "in");
  return add_parts(graph, spec, PartOp::reduce);
}

std::vector<Node> all_gather(Graph& graph, const Collective& spec) {
  need(spec, PartOp::all_gather, static_cast<bool>(spec.out), "out");
  return add_parts(graph, spec, PartOp::all_gather);
}

std::vector<Node> reduce_scatter(Graph& graph, const Collective& spec) {
  need(spec, PartOp::reduce_scatter, static_cast<bool>(spec.in), "in");
  return add_parts(graph, spec, PartOp::reduce_scatter);
}

std::vector<Node> broadcast(Graph& graph, const Collective& spec) {
  need(spec, PartOp::broadcast, static_cast<bool>(spec.out), "out");
  return add_parts(graph, spec, PartOp::broadcast);
}

std::vector<Node> scatter(Graph& graph, const Collective& spec) {
  need(spec, PartOp::scatter, spec.in && spec.out, "in and out");
  return add_parts(graph, spec, PartOp::scatter);
}

std::vector<Node> gather(Graph& graph, const Collective& spec) {
  need(spec, PartOp::gather, spec.in && spec.out, "in and out");
  return add_parts(graph, spec, PartOp::gather);
}

std::vector<Node> all_to_all(Graph& graph, const Collective& spec) {
  need(spec, PartOp::all_to_all, static_cast<bool>(spec.in), "in");
  return add_parts(graph, spec, PartOp::all_to_all);
}

std::vector<Node> permute(Graph& graph, const Collective& spec) {
  need(spec, PartOp::permute, spec.in && spec.out && spec.peer, "in, out and peer");
  return add_parts(graph, spec, PartOp::permute);
}

std::vector<Node> barrier(Graph& graph, const Collective& spec) {
  Collective nothing = spec;
  nothing.in         = {};
  nothing.out        = {};
  return add_parts(graph, nothing, PartOp::barrier);
}

std::vector<Node> send_recv(Graph& graph, const Message& message) {
  if (!message.in || !message.out) refuse(message.name, PartOp::send, "needs `in` and `out`");
  std::vector<Node> nodes;
  for (const PartOp op : {PartOp::send, PartOp::recv}) {
    const bool sends = op == PartOp::send;
    const Rank rank  = sends ? message.from : message.to;
    if (!graph.holds(rank)) continue;
    NodeSpec node{
        .name = message.name,
        .lane = graph.lane(rank, sends ? message.send_lane : message.recv_lane),
        .part =
            PartSpec{
                .group = message.group, .op = op, .peer = sends ? message.to : message.from, .message = message.name},
        .op     = std::string(to_string(op)),
        .labels = message.labels};
    (sends ? node.reads : node.writes) = sends ? message.in() : message.out();
    node.part->type                    = element_type(graph, node, message.type);
    set_costs(graph, node, 0);
    nodes.push_back(graph.add(node));
  }
  return nodes;
}

}  // namespace stepgraph
