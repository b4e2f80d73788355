// Links only stepgraph::engine: builds a graph, verifies it and draws it.
#include <cstdio>
#include <sstream>

#include "engine/draw/dot.hpp"
#include "engine/graph/graph.hpp"
#include "engine/verify/verify.hpp"

int main() {
  stepgraph::Graph graph(1);
  const stepgraph::Buffer x = graph.buffer({.name = "x", .size_bytes = 64});
  graph.add({.name = "make", .writes = {x}}, [] {});
  graph.add({.name = "use", .reads = {x}}, [] {});
  stepgraph::verify(graph);
  std::ostringstream drawing;
  stepgraph::write_dot(graph, drawing);
  std::printf("%u nodes, %zu characters of DOT\n", graph.num_nodes(), drawing.str().size());
  return graph.num_nodes() == 2 && !drawing.str().empty() ? 0 : 1;
}
