#include "engine/run/program/device_bodies.hpp"

#include "engine/base/error.hpp"
#include "engine/run/device.hpp"

namespace stepgraph {
namespace {

// A body on the host can only use memory that the host sees.
std::string host_memory_flaw(const Graph& graph, Node node, const DeviceMemory& memory) {
  for (std::size_t i = 0; i < graph.num_accesses(node); ++i) {
    const Graph::AccessView access = graph.access(node, i);
    const BufferSpec& buffer       = graph.spec(access.buffer);
    if (buffer.token || access.region.length == 0 || buffer.space == Space::disk || memory.host_sees(buffer.space))
      continue;
    return str(graph.describe(node), " is a host node, but its buffer '", buffer.name, "' is in ",
               to_string(buffer.space), " memory, which the host cannot use in this world (copy it to a buffer in ",
               to_string(Space::pinned), " memory first)");
  }
  return {};
}

}  // namespace

std::string device_flaw(const Graph& graph, Node node, const World& world) {
  if (!graph.body(node)) return {};
  if (graph.kind(node) == NodeKind::host) return host_memory_flaw(graph, node, world.device()->memory());
  for (std::size_t i = 0; i < graph.num_accesses(node); ++i) {
    const BufferSpec& buffer = graph.spec(graph.access(node, i).buffer);
    if (buffer.space == Space::disk)
      return str(graph.describe(node), ": its buffer '", buffer.name,
                 "' is on disk, which a device cannot use (make it a host node on lane ", LaneKind::disk, ")");
  }
  if (graph.device(node)) return {};
  return str(graph.describe(node), ", op '", graph.op(node),
             "', has no kernel for a device (set NodeSpec::device and use Context::device in the body; or make it a "
             "host node on a host lane)");
}

void check_device_bodies(const Graph& graph, const World& world) {
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    const std::string flaw = device_flaw(graph, Node{i}, world);
    if (!flaw.empty()) throw Error(ErrorKind::config, "program: " + flaw);
  }
}

}  // namespace stepgraph
