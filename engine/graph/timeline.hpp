#pragma once
#include <cstdint>
#include <vector>

namespace stepgraph {

// When a node ran, in seconds from the start of its step.
struct NodeTime {
  double begin_s      = -1;  // -1: it did not run
  double end_s        = -1;
  std::int32_t worker = -1;  // the thread, or simulated worker, that it ran on; -1: unknown or none
  [[nodiscard]] bool ran() const noexcept { return begin_s >= 0; }
  friend bool operator==(const NodeTime&, const NodeTime&) = default;
};

// The times of one step, measured by a recorder or simulated. Parts that ran as one task have the same times.
struct Timeline {
  std::vector<NodeTime> nodes;  // by node
  double makespan_s                                        = 0;
  friend bool operator==(const Timeline&, const Timeline&) = default;
};

}  // namespace stepgraph
