#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backends/process/environment.hpp"
#include "engine/run/world.hpp"
#include "graphs/config/config.hpp"
#include "tools/stepgraph/command_line.hpp"

namespace stepgraph::cli {

// The world of a backend, "loopback" or "cuda", with all ranks in this process. Throws Error(backend) if this build or
// this machine does not have it. `devices` and `pinned`: of backend cuda (CudaWorldOptions).
[[nodiscard]] std::unique_ptr<World> make_world(std::string_view backend, int num_ranks,
                                                const std::vector<int>& devices = {0}, bool pinned = true);

// The name of the first device in the list, of backends cuda and nccl. Throws Error(backend) if this build or this
// machine has none.
[[nodiscard]] std::string device_name(const std::vector<int>& devices);

// What a config says about the place of this process among several.
[[nodiscard]] PlaceOverrides place_of(const WorldSpec& world);

struct WorldOptions {
  std::string_view command          = {};  // for messages
  std::optional<std::string> flight = {};  // the folder for reports of a failed job; empty: none
  std::vector<std::string> to_write = {};  // files and folders whose temporary ones a dead process may leave
};
void add_flight_option(Command command, std::optional<std::string>& folder);  // --flight

// Calls `work` in the world of a config. With backend gloo, mpi or nccl this is one process of several, and the layout
// must have a rank for each; an error that `work` throws is told to the other processes. If another process has failed,
// its name is printed to stderr, and Exit is thrown. After a signal process 0 prints, under the name of the command,
// and Exit is thrown as well. With another backend, a process that was started as one of several is refused:
// Error(config).
void in_world(const WorldOptions& options, const Config& config, const std::function<void(World&)>& work);

// Between steps: whether following steps are enqueued as one CUDA graph (the default) or node by node. No effect on a
// world without a device.
void set_capture(World& world, bool capture);

}  // namespace stepgraph::cli
