#pragma once
#include "engine/run/world.hpp"

namespace stepgraph {

// For a world on a device: throws Error(config) for a body of this process that can neither enqueue its work on the
// device nor run on the host, and for a host node whose memory the host cannot use. Internal to engine/.
void check_device_bodies(const Graph& graph, const World& world);

}  // namespace stepgraph
