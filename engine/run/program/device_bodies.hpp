#pragma once
#include <string>

#include "engine/run/world.hpp"

namespace stepgraph {

// For a world on a device: why a node cannot run there; empty: it can, or it does not run in this process. A body must
// enqueue its work on the device or run on the host, and the host must be able to use the memory of a host node.
// Internal to engine/.
[[nodiscard]] std::string device_flaw(const Graph& graph, Node node, const World& world);

// Throws Error(config) for the first node with such a flaw.
void check_device_bodies(const Graph& graph, const World& world);

}  // namespace stepgraph
