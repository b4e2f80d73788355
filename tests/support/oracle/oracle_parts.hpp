#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/graph/graph.hpp"

// What the oracle knows of communication: parts byte by byte. Shares nothing with the engine's own sizes and overlaps.
namespace stepgraph::testing {

using Byte = std::pair<std::uint32_t, std::int64_t>;  // buffer, offset

struct Part {
  Node node;
  Graph::PartView view;
  std::size_t member      = 0;  // position in the group
  std::size_t num_members = 0;
  std::vector<Byte> in = {}, out = {};                           // laid end to end
  std::vector<std::size_t> in_accesses = {}, out_accesses = {};  // how many bytes each has
};
using Match = std::vector<Part>;  // all members in group order; or a send and its receive

// All parts of a graph, in the order in which each rank issues; of those issued together, as they were added.
[[nodiscard]] std::vector<Part> all_parts(const Graph& graph);

// Whether parts that meet do one and the same thing.
[[nodiscard]] bool fit(const Graph& graph, const Match& match);

// Whether a part reads and writes a byte that its operation leaves elsewhere, or writes one twice.
[[nodiscard]] bool overlaps_badly(const Graph& graph, const Part& part);

}  // namespace stepgraph::testing
