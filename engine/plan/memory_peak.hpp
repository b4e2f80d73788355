#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/plan/memory_plan.hpp"

namespace stepgraph {

// The turn of a plan's order at which a rank has the most bytes alive in one space, and the buffers that are alive
// then.
struct MemoryPeak {
  std::int64_t bytes        = 0;   // sizes rounded up to the alignment: the lower bound of the arena
  std::optional<Node> node  = {};  // a node of the rank that runs then; none: the rank has only persistent buffers
  std::vector<Buffer> alive = {};  // by number: persistent buffers, and step buffers that are needed then
};

// The plan must be of this graph. Of several turns with equally many bytes, the first.
[[nodiscard]] MemoryPeak memory_peak(const Graph& graph, const MemoryPlan& plan, Rank rank,
                                     Space space = Space::device);

}  // namespace stepgraph
