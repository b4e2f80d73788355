#include "ops/collectives.hpp"

#include "engine/error.hpp"

namespace stepgraph {
namespace {

bool is_here(const Graph& graph, Rank rank) { return !graph.only_rank() || *graph.only_rank() == rank; }

std::int64_t num_bytes(const Graph& graph, const Access& access) {
  return access.region.length == Access::whole ? graph.spec(access.buffer).size_bytes : access.region.num_bytes();
}

// The type of the elements a part moves: as given, else that of the buffers it touches.
DType element_type(const Graph& graph, const NodeSpec& node, std::optional<DType> given) {
  if (given) return *given;
  for (const AccessList* list : {&node.reads, &node.accumulates, &node.writes}) {
    for (const Access& access : list->view()) return graph.spec(access.buffer).type;
  }
  return DType::u8;
}

std::vector<Node> add_parts(Graph& graph, const Collective& spec, PartOp op) {
  std::vector<Node> nodes;
  for (const Rank rank : graph.spec(spec.group).ranks) {
    if (!is_here(graph, rank)) continue;
    NodeSpec node{
        .name = spec.name,
        .lane = graph.lane(rank, spec.lane),
        .part =
            PartSpec{
                .group = spec.group, .op = op, .reduction = spec.reduction, .root = spec.root, .message = spec.name},
        .op     = std::string(to_string(op)),
        .labels = spec.labels};
    const bool reads = spec.in && (op != PartOp::broadcast || rank == spec.root);
    if (reads && !spec.out) {
      node.accumulates.push_back(spec.in(rank));
    } else {
      if (reads) node.reads.push_back(spec.in(rank));
      if (spec.out) node.writes.push_back(spec.out(rank));
    }
    for (const AccessList* list : {&node.reads, &node.accumulates}) {
      for (const Access& access : list->view()) node.cost.bytes_sent += static_cast<double>(num_bytes(graph, access));
    }
    node.part->type = element_type(graph, node, spec.type);
    nodes.push_back(graph.add(node));
  }
  return nodes;
}

void need(const Collective& spec, PartOp op, bool given, const char* what) {
  if (given) return;
  throw Error(ErrorKind::config, str("ops: ", to_string(op), " '", spec.name, "' needs `", what, "`"));
}

}  // namespace

std::vector<Node> all_reduce(Graph& graph, const Collective& spec) {
  need(spec, PartOp::all_reduce, static_cast<bool>(spec.in), "in");
  return add_parts(graph, spec, PartOp::all_reduce);
}

std::vector<Node> all_gather(Graph& graph, const Collective& spec) {
  need(spec, PartOp::all_gather, spec.in && spec.out, "in and out");
  return add_parts(graph, spec, PartOp::all_gather);
}

std::vector<Node> reduce_scatter(Graph& graph, const Collective& spec) {
  need(spec, PartOp::reduce_scatter, spec.in && spec.out, "in and out");
  return add_parts(graph, spec, PartOp::reduce_scatter);
}

std::vector<Node> broadcast(Graph& graph, const Collective& spec) {
  need(spec, PartOp::broadcast, spec.in && spec.out, "in and out");
  return add_parts(graph, spec, PartOp::broadcast);
}

std::vector<Node> barrier(Graph& graph, const Collective& spec) { return add_parts(graph, spec, PartOp::barrier); }

std::vector<Node> send_recv(Graph& graph, const Message& message) {
  if (!message.in || !message.out)
    throw Error(ErrorKind::config, str("ops: message '", message.name, "' needs `in` and `out`"));
  std::vector<Node> nodes;
  for (const PartOp op : {PartOp::send, PartOp::recv}) {
    const bool sends = op == PartOp::send;
    const Rank rank  = sends ? message.from : message.to;
    if (!is_here(graph, rank)) continue;
    NodeSpec node{
        .name = message.name,
        .lane = graph.lane(rank, sends ? message.send_lane : message.recv_lane),
        .part =
            PartSpec{
                .group = message.group, .op = op, .peer = sends ? message.to : message.from, .message = message.name},
        .op     = std::string(to_string(op)),
        .labels = message.labels};
    if (sends) {
      const Access in = message.in();
      node.reads.push_back(in);
      node.cost.bytes_sent = static_cast<double>(num_bytes(graph, in));
    } else {
      node.writes.push_back(message.out());
    }
    node.part->type = element_type(graph, node, message.type);
    nodes.push_back(graph.add(node));
  }
  return nodes;
}

}  // namespace stepgraph
