#pragma once
#include "engine/graph/ordered_graph.hpp"
#include "engine/graph/timeline.hpp"
#include "engine/simulate/machine.hpp"

namespace stepgraph {

// The times at which each node of the graph would run on the machine: the nodes and edges that an executor obeys, with
// the machine's rates in place of bodies. Deterministic: the same graph, edges and machine give the same bits.
//
// - A node starts when its predecessors have ended and it has a worker of its pool. Parts that meet start when all of
//   them are ready, take one worker of each of their pools, and end together.
// - First comes a fixed time (overhead, latency), then work: the node's own work at its own rate, and bytes over buses
//   and links, which it shares max-min fairly with the other nodes that use them at that time.
// - The idle workers of its pools help with a `parallel` node, and with a communication without a network, in equal
//   shares, until another node needs them.
// - A node of an op with a RateTable takes the time of the table: between `alone` and `busy`, by the share of the other
//   workers that have nodes.
// - A collective uses the direct algorithm: every member exchanges its share with every other. Its fixed time is the
//   largest latency from a sender to a receiver, for each round, and the message overhead for each message of the
//   busiest member.
// - Workers are numbered through all pools in their order; -1: the node needs none.
//
// In a slice, the other ranks are assumed to be ready when the parts of its ranks are, and to move as many
// bytes.
//
// Throws Error(graph), naming nodes, when nodes wait for each other in a circle or a part is not matched; Error(config)
// when the machine has another number of ranks.
[[nodiscard]] Timeline simulate(const OrderedGraph& graph, const Machine& machine);

}  // namespace stepgraph
