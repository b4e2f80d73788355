#pragma once
#include <vector>

#include "graphs/step/offload/pass/uses.hpp"

// Updates that run on the host. Internal to graphs/step/offload.
namespace stepgraph::offload {

// By node: it is an update of a unit whose mode is UpdateMode::host.
[[nodiscard]] std::vector<bool> host_nodes(const Graph& graph, const HomeTable& table, const HomePlan& plan);

// Makes entries for the buffers of the device that these nodes use, so that they are copied to the host and back. Small
// buffers that they only read have none: with_homes copies each version of them once.
void add_staged(const Graph& graph, const std::vector<bool>& on_host, HomeTable& table);

// The node as it runs on the host: the same body, without a device.
void run_on_host(Rank rank, NodeSpec& spec);

}  // namespace stepgraph::offload
