#pragma once
#include <string>

namespace stepgraph {
class Graph;
}

namespace stepgraph::bench {

struct OverheadOptions;

// Verifies, simulates and plans a whole graph, and prints a line with the time and the memory of each.
void bench_uses(const std::string& name, const Graph& graph, const OverheadOptions& options);

}  // namespace stepgraph::bench
