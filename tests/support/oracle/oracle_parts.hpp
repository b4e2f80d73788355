#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/graph/graph.hpp"

// Communication for the oracle: parts byte by byte. Shares no code with the engine's sizes and overlaps.
namespace stepgraph::testing {

using Byte = std::pair<std::uint32_t, std::int64_t>;  // buffer, offset

struct Part {
  Node node;
  Graph::PartView view;
  std::size_t member      = 0;  // position in the group
  std::size_t num_members = 0;
  std::vector<Byte> in = {}, out = {};                           // concatenated
  std::vector<std::size_t> in_accesses = {}, out_accesses = {};  // bytes of each access
};
using Match = std::vector<Part>;  // all members in group order; or a send and its receive

// All parts of a graph, in issue order per rank; parts issued together in the order they were added.
[[nodiscard]] std::vector<Part> all_parts(const Graph& graph);

// Whether matched parts describe the same operation.
[[nodiscard]] bool fit(const Graph& graph, const Match& match);

// Whether a part overwrites input that its operation may not overwrite, or writes a byte twice.
[[nodiscard]] bool overlaps_badly(const Graph& graph, const Part& part);

}  // namespace stepgraph::testing
