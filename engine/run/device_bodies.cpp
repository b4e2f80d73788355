#include "engine/run/device_bodies.hpp"

#include "engine/base/error.hpp"
#include "engine/run/device.hpp"

namespace stepgraph {
namespace {

// A body on the host can only use memory that the host sees.
void check_host_memory(const Graph& graph, Node node, const DeviceMemory& memory) {
  for (std::size_t i = 0; i < graph.num_accesses(node); ++i) {
    const Graph::AccessView access = graph.access(node, i);
    const BufferSpec& buffer       = graph.spec(access.buffer);
    if (buffer.token || access.region.length == 0 || memory.host_sees(buffer.space)) continue;
    throw Error(ErrorKind::config,
                str("program: ", graph.describe(node), " is a host node, but its buffer '", buffer.name, "' is in ",
                    to_string(buffer.space), " memory, which the host cannot use in this world (space ",
                    to_string(Space::pinned), ", and a copy)"));
  }
}

}  // namespace

void check_device_bodies(const Graph& graph, const World& world) {
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    const Node node{i};
    if (!world.is_local(graph.rank(node)) || !graph.body(node)) continue;
    if (graph.kind(node) == NodeKind::host) {
      check_host_memory(graph, node, world.device()->memory());
      continue;
    }
    if (graph.device(node)) continue;
    throw Error(ErrorKind::config, str("program: ", graph.describe(node), ", op '", graph.op(node),
                                       "', has no kernel for a device (set NodeSpec::device and use Context::device in "
                                       "the body; or make it a host node on a host lane)"));
  }
}

}  // namespace stepgraph
