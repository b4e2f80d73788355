#include "ops/transfers/offload_copy.hpp"

#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "engine/run/storage.hpp"
#include "ops/tape/streams.hpp"

namespace stepgraph {
namespace {

template <class Spec>
[[noreturn]] void refuse(std::string_view op, const Spec& spec, const std::string& what) {
  throw Error(ErrorKind::config, str(op, " '", spec.name, "': ", what));
}

// Checks that both sides are single ranges of equal size. Returns that size.
template <class Spec>
std::int64_t check_ranges(const Graph& graph, std::string_view op, const Spec& spec) {
  for (const Access* access : {&spec.to, &spec.from}) {
    if (access->region.count > 1)
      refuse(op, spec,
             str(to_string(access->region), " of ", graph.describe(access->buffer), " are several ranges (one range)"));
  }
  const std::int64_t to = num_bytes(graph, spec.to), from = num_bytes(graph, spec.from);
  if (to != from) refuse(op, spec, str(from, " bytes into ", to, " (equal numbers)"));
  return to;
}

AccessList joined(const Access& bytes, const AccessList& tokens) {
  AccessList all{bytes};
  for (const Access& token : tokens.view()) all.push_back(token);
  return all;
}

template <class Spec>
NodeSpec node_of(const Graph& graph, const Spec& spec, std::int64_t bytes) {
  return {.name   = spec.name,
          .lane   = graph.lane(graph.spec(spec.to.buffer).rank, spec.lane),
          .reads  = joined(spec.from, spec.after),
          .writes = joined(spec.to, spec.done),
          .cost   = {.bytes_moved = 2 * static_cast<double>(bytes)},
          .labels = spec.labels};
}

}  // namespace

Node offload_copy(Graph& graph, const OffloadCopy& spec) {
  const Space to = graph.spec(spec.to.buffer).space, from = graph.spec(spec.from.buffer).space;
  const bool up = to == Space::device && from == Space::pinned, down = to == Space::pinned && from == Space::device;
  if (!up && !down) {
    refuse("offload_copy", spec,
           str("from ", to_string(from), " to ", to_string(to), " memory (from pinned to device, or back)"));
  }
  const LaneKind own = up ? LaneKind::h2d : LaneKind::d2h;
  if (spec.lane != own && spec.lane != LaneKind::compute)
    refuse("offload_copy", spec, str("lane ", spec.lane, " (", own, " or compute)"));
  NodeSpec node = node_of(graph, spec, check_ranges(graph, "offload_copy", spec));
  node.kind     = NodeKind::copy;
  node.op       = to_string(own);
  node.parallel = true;
  node.device   = true;
  return graph.add(node, copy_body({.reads = 1, .writes = 1}));
}

Node disk_copy(Graph& graph, const DiskCopy& spec) {
  const Space to = graph.spec(spec.to.buffer).space, from = graph.spec(spec.from.buffer).space;
  const bool reads = to == Space::pinned && from == Space::disk, writes = to == Space::disk && from == Space::pinned;
  if (!reads && !writes) {
    refuse("disk_copy", spec,
           str("from ", to_string(from), " to ", to_string(to), " memory (from disk to pinned, or back)"));
  }
  if (spec.lane != LaneKind::disk) refuse("disk_copy", spec, str("lane ", spec.lane, " (disk)"));
  const Access& stored = reads ? spec.from : spec.to;
  if (stored.region.offset % Storage::block_bytes != 0) {
    refuse("disk_copy", spec,
           str("offset ", stored.region.offset, " in ", graph.describe(stored.buffer), " (a multiple of ",
               Storage::block_bytes, ")"));
  }
  NodeSpec node = node_of(graph, spec, check_ranges(graph, "disk_copy", spec));
  node.kind     = NodeKind::host;
  node.op       = reads ? "disk_read" : "disk_write";
  return graph.add(node, [reads](const Context& context) {
    const StoredBytes at = context.stored(reads ? AccessMode::read : AccessMode::write, 0);
    context.waiting_for(reads ? "a read from disk" : "a write to disk");
    if (reads) {
      at.storage->read(at.offset, context.write<std::byte>());
    } else {
      at.storage->write(at.offset, context.read<std::byte>());
    }
  });
}

}  // namespace stepgraph
