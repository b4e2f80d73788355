#pragma once
#include <memory>
#include <string_view>

#include "engine/run/world.hpp"

namespace stepgraph::cli {

// The world of a backend, "loopback" or "cuda", with all ranks in this process. Throws Error(backend) if this build or
// this machine does not have it.
[[nodiscard]] std::unique_ptr<World> make_world(std::string_view backend, int num_ranks);

// Between steps: whether following steps are enqueued as one CUDA graph (the default) or node by node. No effect on a
// world without a device.
void set_capture(World& world, bool capture);

}  // namespace stepgraph::cli
