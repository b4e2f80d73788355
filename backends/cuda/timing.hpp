#pragma once
#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "backends/cuda/queues.hpp"
#include "engine/graph/timeline.hpp"
#include "engine/run/streams.hpp"

namespace stepgraph::cuda {

cudaEvent_t make_event(int device, unsigned flags);
void drop(cudaEvent_t event) noexcept;  // which may be null

// When the nodes of a run began and ended: by events before and after each node, and by the host's clock for host
// nodes. Events of two devices cannot be compared, so each device has a first event whose time the host knows.
class NodeTiming {
 public:
  // `queues`: by stream; null: it has no nodes.
  NodeTiming(const StreamPlan& plan, std::span<Queue* const> queues);
  ~NodeTiming();
  NodeTiming(const NodeTiming&)            = delete;
  NodeTiming& operator=(const NodeTiming&) = delete;

  void begin();  // of a run; its streams are idle
  [[nodiscard]] cudaError_t before(std::uint32_t node, cudaStream_t stream);
  [[nodiscard]] cudaError_t after(std::uint32_t node, cudaStream_t stream);
  void before_host(std::uint32_t node);
  void after_host(std::uint32_t node);
  [[nodiscard]] std::vector<NodeTime> times() const;  // the streams are idle

 private:
  using Clock = std::chrono::steady_clock;
  struct Base {
    int device;
    cudaStream_t stream;
    cudaEvent_t event;
    double since_s = 0;  // after the first device's
  };
  struct Timing {
    cudaEvent_t begin = nullptr, end = nullptr;
    std::size_t base    = 0;
    double host_begin_s = -1, host_end_s = -1;
    bool issued = false;  // in this run; else a failure came before the node
  };
  void make(const StreamPlan& plan, std::span<Queue* const> queues);
  void drop_all() noexcept;
  [[nodiscard]] double host_s() const;

  std::vector<Base> bases_;
  std::vector<Timing> timing_;  // by node
  Clock::time_point start_;
};

}  // namespace stepgraph::cuda
