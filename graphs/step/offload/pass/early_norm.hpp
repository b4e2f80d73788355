#pragma once
#include <cstdint>
#include <vector>

#include "engine/graph/graph.hpp"

// The order in which the pass visits the nodes. Internal to graphs/step/offload.
namespace stepgraph::offload {

struct NodeOrder {
  std::vector<std::uint32_t> nodes = {};  // by place
  // By node: the node whose microbatch and phase say to which use of a buffer it belongs. A node that was moved belongs
  // to the use of the node that it follows now.
  std::vector<std::uint32_t> like = {};
};

// The nodes in the order of the graph, but the squares of each offloaded gradient are summed directly after its last
// write: it is still on the device then. The sums are exact, so their order changes no bit.
[[nodiscard]] NodeOrder with_early_norms(const Graph& graph, const std::vector<bool>& is_offloaded_gradient);

}  // namespace stepgraph::offload
