#include "tools/bench/overhead/shapes.hpp"

#include <catch2/catch_test_macros.hpp>

#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"

namespace sg = stepgraph;

TEST_CASE("a token graph has the edges of its shape", "[graphs][shapes]") {
  for (const sg::Shape& shape : {sg::chain(100), sg::wide(100u), sg::wavefront(12), sg::random_dag(200, 400, 7)}) {
    CAPTURE(shape.name);
    const sg::Graph graph = sg::token_graph(shape);
    REQUIRE(graph.num_nodes() == shape.num_nodes);
    std::vector<std::pair<std::uint32_t, std::uint32_t>> edges;
    for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
      for (const std::uint32_t before : graph.edges().before({node})) edges.emplace_back(before, node);
    }
    CHECK(edges == shape.edges);
  }
}

TEST_CASE("a random graph with more edges than fit is refused", "[graphs][shapes][refuses]") {
  CHECK_THROWS_AS(sg::random_dag(4, 100, 1), sg::Error);
}
