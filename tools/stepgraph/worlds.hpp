#pragma once
#include <memory>
#include <string_view>

#include "engine/world.hpp"

namespace stepgraph::cli {

// The world of a backend, "loopback" or "cuda", with so many ranks, all in this process. Throws Error(backend) where
// this build or this machine does not have it.
[[nodiscard]] std::unique_ptr<World> make_world(std::string_view backend, int num_ranks);

}  // namespace stepgraph::cli
