#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/graph/ordered_graph.hpp"
#include "engine/plan/node_workspaces.hpp"
#include "engine/run/runnable_graph.hpp"

namespace stepgraph {

class World;  // engine/run/world.hpp

// A graph on the streams of a device. A stream runs its nodes in the order in which they are issued; a node can wait
// for nodes of other streams (an event wait). The plan is data, so it can be verified without a device.
//
// Each lane of a rank is a stream. A node without a lane is put on the stream of the latest node that it follows, those
// of copies (h2d, d2h) aside; or on its rank's compute stream if it follows none or needs workspace, at its place in
// the issue order. That can add order to the graph, but never removes any. A host node is on no stream: the host thread
// that runs it waits. A node that follows host nodes runs when they are done.
struct StreamPlan {
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  std::vector<std::uint32_t> issue_order;  // all nodes; each after the nodes it follows
  RankSet ranks = RankSet::all(1);         // of the graph
  std::vector<std::uint32_t> stream;       // by node: place of its rank * num_lane_kinds + lane kind; none: a host node
  // By node, in compressed rows: the nodes of other streams of the rank that it waits for. Waits that follow from the
  // order of streams and from other waits are left out. `loop` waits are for nodes of the previous run.
  std::vector<std::uint32_t> wait_begin, waits;
  std::vector<std::uint32_t> loop_begin, loop_waits;
  // Likewise: the nodes of host lanes (LaneKind::host) that a node on a stream follows. Its stream waits for them where
  // the device can (DeviceStreams::waits_for_host); else the thread that issues nodes does.
  std::vector<std::uint32_t> host_begin, host_waits;
  // By stream, as numbered above: the workspace that its nodes share. Empty: no stream has any.
  std::vector<std::int64_t> workspace_bytes;
  // The bytes of its stream's workspace that a node's DeviceQueue has, by node; other nodes have none. Exactly these:
  // the bits of a node must not depend on what other nodes of its stream need.
  std::vector<NodeWorkspace> node_workspaces;

  [[nodiscard]] std::span<const std::uint32_t> waits_of(Node node) const;
  [[nodiscard]] std::span<const std::uint32_t> loop_waits_of(Node node) const;
  [[nodiscard]] std::span<const std::uint32_t> host_waits_of(Node node) const;
  [[nodiscard]] Lane lane_of(std::uint32_t number) const;
  [[nodiscard]] std::string name(std::uint32_t number) const;  // "rank 3 gather"
  [[nodiscard]] std::size_t num_streams() const;               // that have nodes
  [[nodiscard]] std::size_t num_events() const;                // nodes that other nodes wait for
  [[nodiscard]] std::int64_t workspace_of(std::uint32_t number) const {
    return workspace_bytes.empty() ? 0 : workspace_bytes[number];
  }
  [[nodiscard]] NodeWorkspace workspace_of(Node node) const;
};

// `order`: all nodes of this process in the order in which they are issued, nodes of one task beside each other.
[[nodiscard]] StreamPlan plan_streams(const OrderedGraph& graph, std::span<const std::uint32_t> order,
                                      const WorkspaceNeeds& needs = {.bodies = true});

// The streams that a program would have if the ranks of the world were on devices. Needs no device.
[[nodiscard]] StreamPlan plan_streams(const RunnableGraph& graph, const World& world);

// The edges of a memory plan, and the order of the streams that the graph would have if its ranks were on devices: for
// simulations of devices, which run the nodes of a stream in the order in which they are issued. Needs no device.
[[nodiscard]] Edges stream_edges(const Graph& graph, const MemoryPlan& plan,
                                 const WorkspaceNeeds& needs = {.bodies = true});

// Throws Error(config) if the streams of a device need more workspace than a memory plan counts.
void check_workspaces(const MemoryPlan& memory, const StreamPlan& plan);

// Throws Error(graph), naming two nodes and their streams, if the order of the streams and the waits do not imply an
// edge: the device could run the two nodes at the same time. Likewise for a node that needs more workspace than its
// stream has.
void verify_streams(const OrderedGraph& graph, const StreamPlan& plan, const WorkspaceNeeds& needs = {.bodies = true});

}  // namespace stepgraph
