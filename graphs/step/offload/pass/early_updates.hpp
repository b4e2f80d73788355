#pragma once
#include <vector>

#include "graphs/step/offload/pass/early_norm.hpp"

// Updates in the backward pass. Internal to graphs/step/offload.
namespace stepgraph::offload {

// with_early_norms, and updates (phase "update") come as early as the nodes before them that they depend on allow:
// usually directly after the gradient of their weight. The updates of a layer stay together, behind the last of these
// nodes, so that the states of a unit are on the device for a short time. Nodes of the compute lane do not move behind
// a collective: the nodes after it would have to wait for it. No node passes another one that it has bytes in common
// with, so no bit changes. `on_host`: by node.
[[nodiscard]] NodeOrder with_early_updates(const Graph& graph, const std::vector<bool>& is_offloaded_gradient,
                                           const std::vector<bool>& on_host);

}  // namespace stepgraph::offload
