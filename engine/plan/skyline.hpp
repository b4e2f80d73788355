#pragma once
#include <vector>

#include "engine/plan/packing.hpp"

namespace stepgraph {

// Which item is preferred: the one that lives longest, the largest one, or the one with the largest product of both.
enum class SkylinePreference { long_lived, large, both };

// Fills an arena from the bottom: finds the lowest stretch of turns and puts there the preferred item among those
// that live within it. If there is none, the stretch is raised to its lower neighbour. (Burke's best-fit heuristic for
// strip packing, with fixed places in time.) Internal to engine/.
[[nodiscard]] Packing pack_by_skyline(const std::vector<PackItem>& items, SkylinePreference preference);

}  // namespace stepgraph
