#pragma once
#include <cstdint>
#include <vector>

#include "engine/plan/workspaces.hpp"

namespace stepgraph {

// The bytes of its stream's workspace that a node uses. The nodes of a stream run one after another, so they share its
// bytes. Parts with one issue position are issued together: on one lane each of them has bytes of its own.
struct NodeWorkspace {
  static constexpr std::int64_t alignment = 256;

  Node node                                                          = {};
  std::int64_t offset_bytes                                          = 0;
  std::int64_t size_bytes                                            = 0;
  friend bool operator==(const NodeWorkspace&, const NodeWorkspace&) = default;
  [[nodiscard]] std::int64_t end() const noexcept { return offset_bytes + size_bytes; }
};
// By node; without nodes that need none.
[[nodiscard]] std::vector<NodeWorkspace> node_workspaces(const Graph& graph, const WorkspaceNeeds& needs);

}  // namespace stepgraph
