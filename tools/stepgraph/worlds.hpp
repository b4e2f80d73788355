#pragma once
#include <memory>
#include <string_view>

#include "engine/world.hpp"

namespace stepgraph::cli {

struct WorldOptions {
  bool capture = true;  // on a device: whole steps are enqueued as one
};

// The world of a backend, "loopback" or "cuda", with so many ranks, all in this process. Throws Error(backend) where
// this build or this machine does not have it.
[[nodiscard]] std::unique_ptr<World> make_world(std::string_view backend, int num_ranks,
                                                const WorldOptions& options = {});

}  // namespace stepgraph::cli
