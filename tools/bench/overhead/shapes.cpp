#include "tools/bench/overhead/shapes.hpp"

#include <algorithm>
#include <random>

#include "engine/base/error.hpp"

namespace stepgraph {

Shape chain(std::uint32_t num_nodes) {
  Shape shape{"chain", num_nodes, {}};
  for (std::uint32_t node = 1; node < num_nodes; ++node) shape.edges.emplace_back(node - 1, node);
  return shape;
}

Shape wide(std::uint32_t num_nodes) { return {"wide", num_nodes, {}}; }

Shape wavefront(std::uint32_t side) {
  Shape shape{"wavefront", side * side, {}};
  for (std::uint32_t row = 0; row < side; ++row) {
    for (std::uint32_t column = 0; column < side; ++column) {
      const std::uint32_t node = row * side + column;
      if (row > 0) shape.edges.emplace_back(node - side, node);
      if (column > 0) shape.edges.emplace_back(node - 1, node);
    }
  }
  return shape;
}

Shape random_dag(std::uint32_t num_nodes, std::uint32_t num_edges, std::uint64_t seed) {
  if (std::uint64_t{num_edges} > std::uint64_t{num_nodes} * (num_nodes - (num_nodes > 0 ? 1 : 0)) / 4) {
    throw Error(ErrorKind::config, str("random_dag: ", num_edges, " edges are too many for ", num_nodes,
                                       " nodes (at most half of all pairs)"));
  }
  Shape shape{"random", num_nodes, {}};
  std::mt19937_64 random(seed);
  const auto by_target = [](const auto& a, const auto& b) {
    return std::pair(a.second, a.first) < std::pair(b.second, b.first);
  };
  while (shape.edges.size() < num_edges) {
    while (shape.edges.size() < num_edges) {
      const auto a = static_cast<std::uint32_t>(random() % num_nodes),
                 b = static_cast<std::uint32_t>(random() % num_nodes);
      if (a != b) shape.edges.emplace_back(std::min(a, b), std::max(a, b));
    }
    std::sort(shape.edges.begin(), shape.edges.end(), by_target);
    shape.edges.erase(std::unique(shape.edges.begin(), shape.edges.end()), shape.edges.end());
  }
  return shape;
}

Graph token_graph(const Shape& shape, const Body& body) {
  Graph graph;
  auto edge = shape.edges.begin();
  NodeSpec spec{.rank = Rank{0}};
  for (std::uint32_t node = 0; node < shape.num_nodes; ++node) {
    spec.reads  = {};
    spec.writes = {graph.token(Rank{0})};  // the node-th buffer
    for (; edge != shape.edges.end() && edge->second == node; ++edge) spec.reads.push_back(Buffer{edge->first});
    graph.add(spec, body);
  }
  return graph;
}

}  // namespace stepgraph
