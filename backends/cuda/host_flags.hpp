#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "backends/cuda/heap.hpp"
#include "engine/graph/graph.hpp"
#include "engine/run/streams.hpp"

namespace stepgraph::cuda {

// Words of pinned memory that tell the device how many nodes of each host lane are done. A stream waits until a word
// has reached a number; so nodes that follow host nodes can be enqueued before those are done. The order of issue is a
// topological order, and a stream's wait holds up only work that was issued later: so no wait can hold up the nodes
// that its host node follows, also where streams share a queue of the hardware.
//
// Words count on from run to run (modulo 2^32), so nothing is reset on the device. Runs with host nodes are not
// captured.
class HostFlags {
 public:
  // Counts the nodes of LaneKind::host. Throws Error(backend) without memory.
  HostFlags(const Graph& graph, const StreamPlan& plan, Heap& heap);
  ~HostFlags();
  HostFlags(const HostFlags&)            = delete;
  HostFlags& operator=(const HostFlags&) = delete;

  // Whether the driver and the device can wait for a word.
  [[nodiscard]] static bool supported(int device);

  void begin() noexcept;                                     // of a run
  void set_done(std::uint32_t node) noexcept;                // on the thread of the lane; other nodes: does nothing
  void wait(cudaStream_t stream, std::uint32_t node) const;  // enqueues a wait for a node of a host lane
  void release() noexcept;                                   // at the end of a run: all count as done

 private:
  static constexpr std::uint32_t none = ~std::uint32_t{0};
  struct Place {
    std::uint32_t word = none, number = 0;  // number: from 1, in issue order
  };
  void raise(std::uint32_t word, std::uint32_t to) noexcept;

  std::vector<Place> place_;           // by node
  std::vector<std::uint32_t> counts_;  // by word: nodes of a run
  std::vector<std::uint32_t> bases_;   // by word: its value when the run began
  Heap& heap_;
  std::uint32_t* words_ = nullptr;
  std::uint32_t* there_ = nullptr;  // their address on the device
};

}  // namespace stepgraph::cuda
