#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/graph/timeline.hpp"
#include "engine/simulate/machine.hpp"
#include "graphs/train/step_run.hpp"

// What offload does in one step.
namespace stepgraph {

// Bytes that the nodes of a graph move between spaces. Compressed tensors count with their compressed size.
struct TransferBytes {
  std::int64_t h2d                                                   = 0;
  std::int64_t d2h                                                   = 0;
  std::int64_t disk_read                                             = 0;
  std::int64_t disk_write                                            = 0;
  friend bool operator==(const TransferBytes&, const TransferBytes&) = default;
};
[[nodiscard]] TransferBytes transfer_bytes(const Graph& graph);

// Of all ranks together. Times are sums over ranks.
struct OffloadFigures {
  TransferBytes moved       = {};
  double transfer_s         = 0;  // in which a rank transfers
  double exposed_s          = 0;  // of it: the rank does not compute meanwhile
  std::int64_t host_bytes   = 0;  // planned: homes and staging
  std::int64_t disk_bytes   = 0;
  std::int64_t raw_bytes    = 0;      // of tensors that have homes ...
  std::int64_t stored_bytes = 0;      // ... and of these homes. Lossless compression: what it has reached, after a run
  bool lossy                = false;  // a home can lose bits
  std::vector<OffloadedUnit> units = {};  // of all ranks, one after another

  [[nodiscard]] double ratio() const noexcept {  // stored / raw
    return raw_bytes > 0 ? static_cast<double>(stored_bytes) / static_cast<double>(raw_bytes) : 1;
  }
};
// Whether weights of these units lie in homes that can lose bits.
[[nodiscard]] bool rounds_weights(std::span<const OffloadedUnit> units);
// Of the ranks that the step holds.
[[nodiscard]] OffloadFigures offload_figures(const StepGraph& step, const MemoryPlan& plan, const Timeline& timeline);
// Of a recorded run, collective. Process 0: of all ranks.
[[nodiscard]] OffloadFigures offload_figures(const StepRun& run, const Timeline& timeline);

// A step on a measured device.
struct PredictedStep {
  double seconds = 0;
  // A lower bound of `seconds`, and what the step waits for: the lane that is busy longest ("compute", "communication",
  // "h2d", "d2h", "host" or "disk"), or the busiest lanes before and after a node, if they and the node take longer
  // ("h2d, then compute"). A phase that takes less than 5% of the bound is not named. The bound follows from what nodes
  // access, the order of lanes and the simulated times of nodes. So it holds with any memory plan, if the machine runs
  // the nodes of a rank that have no lane one at a time, as devices do (least_time).
  std::string bound = {};
  double bound_s    = 0;
};
[[nodiscard]] PredictedStep predicted_step(const Graph& graph, const MemoryPlan& plan, const Machine& device);
[[nodiscard]] PredictedStep predicted_step(const Graph& graph, const Timeline& simulated);

}  // namespace stepgraph
