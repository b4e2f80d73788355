#include "graphs/step/builder/part_node.hpp"

#include "engine/base/error.hpp"

namespace stepgraph {

Cost part_cost(PartOp op, std::int64_t size_bytes, int members, bool is_root) {
  const auto bytes = static_cast<double>(size_bytes);
  switch (op) {
    case PartOp::send:
      return {.bytes_moved = bytes, .bytes_sent = bytes};
    case PartOp::recv:
      return {.bytes_moved = bytes};
    case PartOp::all_reduce:
      return {.bytes_moved = 2 * bytes, .bytes_sent = bytes * (members - 1)};
    case PartOp::all_gather:
    case PartOp::reduce_scatter:
      return {.bytes_moved = 2 * bytes, .bytes_sent = bytes * (members - 1) / members};
    case PartOp::reduce:
      return {.bytes_moved = is_root ? 2 * bytes : bytes, .bytes_sent = is_root ? 0 : bytes};
    case PartOp::broadcast:
      return {.bytes_moved = bytes, .bytes_sent = is_root ? bytes * (members - 1) : 0};
    default:
      throw Error(ErrorKind::graph, str("step: the cost of ", to_string(op), " is not known"));
  }
}

Node add_part(Graph& graph, const PartNode& node) {
  return graph.add({.name        = node.name,
                    .lane        = graph.lane(node.rank, node.lane),
                    .reads       = node.reads,
                    .writes      = node.writes,
                    .accumulates = node.accumulates,
                    .part        = PartSpec{.group   = node.group,
                                            .op      = node.op,
                                            .type    = node.type,
                                            .peer    = node.peer,
                                            .root    = node.root,
                                            .message = node.message.empty() ? node.name : node.message},
                    .kind        = NodeKind::communicate,
                    .op          = std::string(to_string(node.op)),
                    .cost        = part_cost(node.op, node.bytes, node.members, node.rank == node.root),
                    .labels      = node.labels});
}

}  // namespace stepgraph
