#include "ops/transfers/reduce.hpp"

#include "engine/base/error.hpp"
#include "ops/tape/streams.hpp"

namespace stepgraph {
namespace {

// Returns the element type of the accesses. Throws if their ranges are not whole elements of it.
DType check_elements(const Graph& graph, const std::string& name, const AccessList& accesses,
                     std::optional<DType> given) {
  if (accesses.empty()) throw Error(ErrorKind::config, str("ops: '", name, "' has no accesses (at least one)"));
  const DType type = given.value_or(graph.spec(accesses.view().front().buffer).type);
  for (const Access& access : accesses.view()) {
    const std::int64_t length =
        access.region.length == Access::whole ? graph.spec(access.buffer).size_bytes : access.region.length;
    if (length % static_cast<std::int64_t>(size_bytes(type)) == 0) continue;
    throw Error(ErrorKind::config,
                str("ops: '", name, "': ranges of ", length, " bytes are not whole elements of ", type));
  }
  return type;
}

double check_sizes(const Graph& graph, const std::string& name, const AccessList& to, const AccessList& from) {
  const std::int64_t wanted = num_bytes(graph, to), given = num_bytes(graph, from);
  if (wanted == given) return static_cast<double>(wanted);
  throw Error(ErrorKind::config, str("ops: '", name, "': ", given, " bytes into ", wanted, " (equal numbers)"));
}

// Tiles run in parallel, so no tile may read bytes that another tile writes.
void check_apart(const Graph& graph, const std::string& name, const AccessList& to, const AccessList& from) {
  for (const Access& a : to.view()) {
    for (const Access& b : from.view()) {
      if (a.buffer != b.buffer) continue;
      const auto region = [&](const Access& access) {  // in normal form
        if (access.region.length == Access::whole) return Region{.length = graph.spec(access.buffer).size_bytes};
        if (access.region.count > 1 && access.region.length < access.region.stride) return access.region;
        return Region{.offset = access.region.offset, .length = access.region.num_bytes()};
      };
      if (region(a).length == 0 || region(b).length == 0 || !overlap(region(a), region(b))) continue;
      throw Error(ErrorKind::config,
                  str("ops: '", name, "': ", to_string(region(b)), " and ", to_string(region(a)), " of ",
                      graph.describe(a.buffer), " overlap (input and output must be disjoint)"));
    }
  }
}

std::optional<Lane> lane_of(const Graph& graph, const AccessList& accesses, std::optional<LaneKind> kind) {
  if (!kind || accesses.empty()) return std::nullopt;
  return graph.lane(graph.spec(accesses.view().front().buffer).rank, *kind);
}

}  // namespace

Node copy(Graph& graph, const Copy& spec) {
  const double bytes = check_sizes(graph, spec.name, spec.to, spec.from);
  check_apart(graph, spec.name, spec.to, spec.from);
  return graph.add({.name     = spec.name,
                    .lane     = lane_of(graph, spec.to, spec.lane),
                    .reads    = spec.from,
                    .writes   = spec.to,
                    .kind     = NodeKind::copy,
                    .op       = "copy",
                    .parallel = true,
                    .device   = true,
                    .cost     = {.bytes_moved = 2 * bytes},
                    .labels   = spec.labels},
                   copy_body({.reads = spec.from.view().size(), .writes = spec.to.view().size()}));
}

Node reduce_into(Graph& graph, const ReduceInto& spec) {
  const double bytes = check_sizes(graph, spec.name, spec.into, spec.from);
  check_apart(graph, spec.name, spec.into, spec.from);
  const DType type = check_elements(graph, spec.name, spec.into, spec.type);
  check_elements(graph, spec.name, spec.from, type);
  return graph.add(
      {.name        = spec.name,
       .lane        = lane_of(graph, spec.into, spec.lane),
       .reads       = spec.from,
       .accumulates = spec.into,
       .op          = "reduce_into",
       .parallel    = true,
       .device      = true,
       .cost        = {.flops = bytes / static_cast<double>(size_bytes(type)), .bytes_moved = 3 * bytes},
       .labels      = spec.labels},
      reduce_body({.reads = spec.from.view().size(), .accumulates = spec.into.view().size()}, type, spec.reduction));
}

Node divide(Graph& graph, const DivideBy& spec) {
  if (spec.count < 1)
    throw Error(ErrorKind::config, str("ops: divide '", spec.name, "' by ", spec.count, " (at least 1)"));
  const DType type = check_elements(graph, spec.name, spec.values, spec.type);
  const auto bytes = static_cast<double>(num_bytes(graph, spec.values));
  return graph.add({.name        = spec.name,
                    .lane        = lane_of(graph, spec.values, spec.lane),
                    .accumulates = spec.values,
                    .op          = "divide",
                    .parallel    = true,
                    .device      = true,
                    .cost        = {.flops = bytes / static_cast<double>(size_bytes(type)), .bytes_moved = 2 * bytes},
                    .labels      = spec.labels},
                   divide_body({.accumulates = spec.values.view().size()}, type, spec.count));
}

}  // namespace stepgraph
