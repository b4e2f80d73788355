#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/graph/timeline.hpp"

// What the engine asks of a device on which bodies enqueue their work and return: implemented in backends/.
namespace stepgraph {

struct StreamPlan;  // engine/run/streams.hpp

// Where a body puts its work: what is enqueued there runs in this order, after the body has returned. Handles are the
// vendor's, as opaque pointers; only ops/cuda/ and backends/ know what is behind them.
struct DeviceQueue {
  void* owner                    = nullptr;  // the backend's own
  void* stream                   = nullptr;  // cudaStream_t
  void* blas                     = nullptr;  // cublasLtHandle_t
  void* dnn                      = nullptr;  // cudnnHandle_t, which works on the stream
  std::span<std::byte> workspace = {};       // device memory of this stream alone; none on lanes that do not compute
  std::span<unsigned> counters   = {};       // likewise; they are 0 between kernels: who counts there leaves them so
  bool tf32                      = false;    // products of f32 may be computed from 19 bits of each number
};

// The memory of the ranks that live on devices. What reads or writes waits until the device has done what was enqueued.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  // Zeroed. Throws Error(backend) that says what was asked for and what is free.
  [[nodiscard]] virtual std::byte* allocate(Rank rank, Space space, std::size_t size) = 0;
  virtual void release(Rank rank, Space space, std::byte* bytes) noexcept             = 0;
  [[nodiscard]] virtual bool host_sees(Space space) const noexcept                    = 0;
  virtual void read(const std::byte* from, std::span<std::byte> to)                   = 0;
  virtual void write(std::byte* to, std::span<const std::byte> from)                  = 0;
};

// The streams of one program on a device: a StreamPlan made real. One thread issues a run, node by node in the plan's
// issue order. World::communicate issues a communication, between before() and after() of all its parts. For host nodes
// that have a lane, the thread of that lane calls before() and after(), while other nodes are issued.
class DeviceStreams {
 public:
  virtual ~DeviceStreams() = default;
  // Enqueues a whole run that was issued and kept before; false: there is none, issue it.
  [[nodiscard]] virtual bool replay() = 0;
  virtual void begin(bool recorded)   = 0;  // a run; recorded: with times, which `times` has when it is done
  // Makes the node's stream wait for the nodes it follows. Null: a host node; the host has waited.
  [[nodiscard]] virtual const DeviceQueue* before(Node node) = 0;
  virtual void after(Node node)                              = 0;
  virtual void end(bool good)                                = 0;  // all was issued, or something failed
  [[nodiscard]] virtual bool done()                          = 0;  // the device has; throws Error(backend) if it failed
  [[nodiscard]] virtual std::vector<NodeTime> times()        = 0;
};

class Device {
 public:
  virtual ~Device()                                                                               = default;
  [[nodiscard]] virtual DeviceMemory& memory()                                                    = 0;
  [[nodiscard]] virtual std::unique_ptr<DeviceStreams> lower(const Graph& graph, StreamPlan plan) = 0;
};

}  // namespace stepgraph
