#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "backends/cuda/heap.hpp"
#include "engine/graph/graph.hpp"
#include "engine/run/device.hpp"
#include "engine/run/streams.hpp"

namespace stepgraph::cuda {

// How far the streams of a program have come, in captured runs too: each stream has a word in pinned memory, which the
// device writes. The nodes of a stream are cut into stretches: the parts of a batch, or up to 32 other nodes of which
// only the first waits for another stream. The device writes 2 i + 1 when it enters stretch i of the stream, after its
// waits, and 2 i + 2 when it leaves it, unless it enters the next one at once. A write takes 2 to 4 us of the stream.
//
// One thread calls reset(), before() and after(). Any thread may ask.
class Marks {
 public:
  Marks(const Graph& graph, const StreamPlan& plan, Heap& heap);
  ~Marks();
  Marks(const Marks&)            = delete;
  Marks& operator=(const Marks&) = delete;

  void reset();                                          // before a run; the run before it is over
  void before(std::uint32_t node, cudaStream_t stream);  // after the waits of the node
  void after(std::uint32_t node, cudaStream_t stream);

  [[nodiscard]] DeviceProgress progress() const;  // parts count as entered if their batch is on all its streams
  [[nodiscard]] bool is_busy(std::uint32_t stream) const;  // it has entered a stretch and not left it

 private:
  static constexpr std::uint32_t none = StreamPlan::none;
  struct Stretch {
    std::uint32_t stream, number;  // its place among those of the stream
    std::uint32_t batch;           // of its parts; none: it has no parts
    std::vector<std::uint32_t> nodes;
    bool leaves = true;                          // false: the next stretch begins without a wait
    std::uint64_t num_before;                    // nodes of earlier stretches of the stream
    std::uint32_t num_begun = 0, num_ended = 0;  // of its nodes, in the run that is issued
  };
  void cut(const Graph& graph, const StreamPlan& plan);
  [[nodiscard]] std::uint32_t word(std::uint32_t stream) const;

  std::vector<Stretch> stretches_;
  std::vector<std::uint32_t> place_;                   // by node, in the issue order
  std::vector<std::uint32_t> stretch_of_;              // by node; none: a host node
  std::vector<std::vector<std::uint32_t>> by_stream_;  // stretches, in issue order
  std::vector<std::vector<std::uint32_t>> batches_;    // stretches
  Heap& heap_;
  std::uint32_t* words_ = nullptr;  // by stream, as the host sees them
  std::uint32_t* there_ = nullptr;  // as the device does
};

}  // namespace stepgraph::cuda
