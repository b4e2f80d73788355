#pragma once
#include <functional>
#include <memory>
#include <string_view>

#include "engine/run/world.hpp"
#include "graphs/config/config.hpp"

namespace stepgraph::cli {

// The world of a backend, "loopback" or "cuda", with all ranks in this process. Throws Error(backend) if this build or
// this machine does not have it.
[[nodiscard]] std::unique_ptr<World> make_world(std::string_view backend, int num_ranks);

// Calls `work` in the world of a config. With backend gloo or mpi this is one process of several, and the layout must
// have a rank for each; an error that `work` throws is told to the other processes. If another process has failed, its
// name is printed to stderr, and Exit is thrown.
void in_world(const Config& config, const std::function<void(World&)>& work);

// Between steps: whether following steps are enqueued as one CUDA graph (the default) or node by node. No effect on a
// world without a device.
void set_capture(World& world, bool capture);

}  // namespace stepgraph::cli
