#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// Task graphs of known shapes, for benchmarks and tests of the engine.
struct Shape {
  std::string name;
  std::uint32_t num_nodes = 0;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> edges;  // (before, after), by `after`, before < after
};

[[nodiscard]] Shape chain(std::uint32_t num_nodes);
[[nodiscard]] Shape wide(std::uint32_t num_nodes);  // no edges
[[nodiscard]] Shape wavefront(std::uint32_t side);  // side x side, each after its upper and left neighbours
[[nodiscard]] Shape random_dag(std::uint32_t num_nodes, std::uint32_t num_edges, std::uint64_t seed);

// The shape as a graph of nodes without lanes on one rank, all with the same body. Each node writes a token that its
// successors read, so the derived edges are those of the shape.
[[nodiscard]] Graph token_graph(const Shape& shape, const Body& body = Body([] {}));

}  // namespace stepgraph
