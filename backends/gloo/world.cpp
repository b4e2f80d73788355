#include "backends/gloo/world.hpp"

#include <utility>

#include "backends/gloo/network.hpp"

namespace stepgraph {

GlooWorld::GlooWorld(const ProcessPlace& place, ProcessWorldOptions options)
    : MessageWorld(place, options, [timeout = options.timeout](Job& job, Hooks hooks) {
        return std::make_unique<GlooNetwork>(job, std::move(hooks), timeout);
      }) {}

}  // namespace stepgraph
