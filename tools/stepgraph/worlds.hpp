#pragma once
#include <memory>
#include <string_view>

#include "engine/run/world.hpp"

namespace stepgraph::cli {

// The world of a backend, "loopback" or "cuda", with so many ranks, all in this process. Throws Error(backend) where
// this build or this machine does not have it.
[[nodiscard]] std::unique_ptr<World> make_world(std::string_view backend, int num_ranks);

// From now on, between steps: whether a device's steps are enqueued as one, as they are at first, or node by node. A
// world without a device has none to enqueue.
void set_capture(World& world, bool capture);

}  // namespace stepgraph::cli
