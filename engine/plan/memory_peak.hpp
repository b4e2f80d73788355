#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/plan/memory_plan.hpp"

namespace stepgraph {

// Where along a plan's order a rank has the most bytes alive in one space, and what they are: what its arena is for.
struct MemoryPeak {
  std::int64_t bytes        = 0;   // sizes rounded up to the alignment: the arena's lower bound
  std::optional<Node> node  = {};  // one of the rank that runs then; none: only persistent buffers are ever alive
  std::vector<Buffer> alive = {};  // by number: persistent buffers, and those of the step that are needed then
};

// Of a plan that was made for this graph. Of several turns with as many bytes, the first.
[[nodiscard]] MemoryPeak memory_peak(const Graph& graph, const MemoryPlan& plan, Rank rank,
                                     Space space = Space::device);

}  // namespace stepgraph
