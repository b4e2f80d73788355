#pragma once
#include "engine/graph/ordered_graph.hpp"
#include "engine/graph/timeline.hpp"
#include "engine/simulate/machine.hpp"

namespace stepgraph {

// When each node of the graph would run on the machine: the nodes and edges that an executor obeys, with the machine's
// rates in place of bodies. Deterministic: the same graph, edges and machine give the same bits.
//
// - A node starts when its predecessors have ended and it has a worker of its pool. Parts that meet start when all of
//   them are ready, take one worker of each of their pools, and end together.
// - First comes a fixed time (overhead, latency), then work: own work at its own rate, and bytes over the buses and
//   links that it shares, max-min fairly, with whatever else uses them at that time.
// - A `parallel` node, and a communication without a network, is worked on by the idle workers of its pools too, in
//   equal shares, until something else needs them.
// - A node of an op that was measured takes the time that its table says, nearer to `busy` or to `alone` as more or
//   fewer of the other workers have nodes.
// - A collective is the direct algorithm: every member exchanges its share with every other. Its fixed time is the
//   largest latency from one that sends to one that takes, for each round, and the message overhead for each message of
//   the busiest member.
// - The worker of a node is counted through all pools in their order; -1: it needs none.
//
// A graph of one rank is simulated alone: others are taken to come when its parts do, and to move as much as they.
//
// Throws Error(graph), naming nodes, when nodes wait for each other in a circle or a part meets nobody; Error(config)
// when the machine is for another number of ranks.
[[nodiscard]] Timeline simulate(const OrderedGraph& graph, const Machine& machine);

}  // namespace stepgraph
