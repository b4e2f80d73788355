#pragma once
#include <catch2/catch_test_macros.hpp>

#include "tests/support/conformance/world_conformance.hpp"
#include "tests/support/scale.hpp"

namespace stepgraph::testing {

// The conformance suite as a test, for worlds that hold all ranks. `make(num_ranks)` creates a world.
template <class MakeWorld>
requires std::invocable<MakeWorld&, int>
void world_conformance(MakeWorld make, const ConformanceOptions& options = {}) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    if (sanitized() && (ranks == 3 || ranks == 8)) continue;
    CAPTURE(ranks);
    auto world = make(ranks);
    CHECK(world_conformance(static_cast<World&>(world), options) == std::vector<std::string>{});
  }
}

}  // namespace stepgraph::testing
