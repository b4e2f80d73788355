#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/graph/ordered_graph.hpp"
#include "engine/run/runnable_graph.hpp"

namespace stepgraph {

class World;  // engine/run/world.hpp

// A graph as streams: queues of a device, each of which runs what is put there in its order, and waits of one for
// another. Data, so that it can be looked at and proved without a device.
//
// Each lane of a rank is a stream. A node without a lane is put on the stream of the latest node that it follows (or
// its rank's compute stream, where it follows none), at its place in the issue order: that orders more than the graph
// asks for, never less. A host node is on no stream: whoever runs it waits.
struct StreamPlan {
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  std::vector<std::uint32_t> issue_order;  // all nodes; each after those it follows
  std::vector<std::uint32_t> stream;       // by node: rank * num_lane_kinds + lane kind; none: a host node
  // By node, in compressed rows: whom of another stream of the rank it waits for. What streams and other waits imply is
  // not in the list. `loop` waits are for nodes of the run before.
  std::vector<std::uint32_t> wait_begin, waits;
  std::vector<std::uint32_t> loop_begin, loop_waits;

  [[nodiscard]] std::span<const std::uint32_t> waits_of(Node node) const;
  [[nodiscard]] std::span<const std::uint32_t> loop_waits_of(Node node) const;
  [[nodiscard]] std::size_t num_streams() const;  // that have nodes
  [[nodiscard]] std::size_t num_events() const;   // nodes that others wait for
};

// `order`: all nodes of this process in the order in which they are issued, nodes of one task beside each other.
[[nodiscard]] StreamPlan plan_streams(const OrderedGraph& graph, std::span<const std::uint32_t> order);

// The streams that a program would have if the ranks of the world were on devices. Needs no device.
[[nodiscard]] StreamPlan plan_streams(const RunnableGraph& graph, const World& world);

// Throws Error(graph), naming two nodes and their streams, where an edge is not implied by the order of streams and the
// waits: the device could run them at once.
void verify_streams(const OrderedGraph& graph, const StreamPlan& plan);

// "rank 3 gather"
[[nodiscard]] std::string stream_name(std::uint32_t stream);

}  // namespace stepgraph
