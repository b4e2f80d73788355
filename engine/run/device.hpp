#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/graph/timeline.hpp"

// What the engine needs from a device on which bodies enqueue their work and return. Implemented in backends/.
namespace stepgraph {

struct StreamPlan;  // engine/run/streams.hpp

// The queue for the work of a body. Work runs in the order in which it is enqueued, possibly after the body has
// returned. Handles are opaque pointers of the vendor's libraries; only ops/cuda/ and backends/ know their types.
struct DeviceQueue {
  void* owner                    = nullptr;  // of the backend
  void* stream                   = nullptr;  // cudaStream_t
  void* blas                     = nullptr;  // cublasLtHandle_t
  void* dnn                      = nullptr;  // cudnnHandle_t, which works on the stream
  std::span<std::byte> workspace = {};       // device memory of this stream only: the node's StreamPlan::workspace_of
  std::span<unsigned> counters   = {};       // of this stream only, on compute lanes; 0 between kernels: a kernel that
                                             // counts there resets them
  bool tf32 = false;                         // f32 matrix products may use TF32 (19 bits of each number)
};

// The memory of the ranks that live on devices. read() and write() wait until the device has done all enqueued work.
// After DeviceStreams::abandon, release() frees nothing, and all other functions that use the device throw
// Error(backend).
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  // Zeroed. Throws Error(backend) with the size asked for and the free memory.
  [[nodiscard]] virtual std::byte* allocate(Rank rank, Space space, std::size_t size) = 0;
  virtual void release(Rank rank, Space space, std::byte* bytes) noexcept             = 0;
  [[nodiscard]] virtual bool host_sees(Space space) const noexcept                    = 0;
  // The memory of a rank's device; of ranks that share a device, an equal part. 0: not known.
  [[nodiscard]] virtual std::int64_t size_bytes(Rank rank) const {
    static_cast<void>(rank);
    return 0;
  }
  virtual void read(const std::byte* from, std::span<std::byte> to)  = 0;
  virtual void write(std::byte* to, std::span<const std::byte> from) = 0;
};

// The streams of one program on a device: a StreamPlan made real. One thread issues a run, node by node in the plan's
// issue order. World::communicate issues a communication, between before() and after() of all its parts. For host nodes
// that have a lane, the thread of that lane calls before() and after(), while other nodes are issued.
//
// No function waits for work that was enqueued: a device may never finish, and the engine then gives it up. The engine
// polls vacant(), ready() and done(), and stops polling when the run is stopped.
class DeviceStreams {
 public:
  virtual ~DeviceStreams() = default;
  // Whether a run can begin: no other program has work on the device.
  [[nodiscard]] virtual bool vacant() = 0;
  // Enqueues a whole run that was captured before; false: there is none, issue the run node by node.
  [[nodiscard]] virtual bool replay() = 0;
  virtual void begin(bool recorded)   = 0;  // of a run; recorded: `times` returns its times when it is done
  // Whether before() of a host node can be called: the nodes that it follows are done. Other nodes: true.
  [[nodiscard]] virtual bool ready(Node node) = 0;
  // Whether before() makes the node's stream wait for the nodes of host lanes that it follows (StreamPlan::host_waits),
  // and for the nodes that those wait for. The engine then issues the node before they are done. Else it waits first.
  [[nodiscard]] virtual bool waits_for_host() const noexcept { return false; }
  // Makes the node's stream wait for the nodes it follows. Null: a host node.
  [[nodiscard]] virtual const DeviceQueue* before(Node node) = 0;
  virtual void after(Node node)                              = 0;
  // The run was stopped: no stream waits for a host node from here on. Any thread may call it during a run; the issuing
  // thread may be held up by a stream that waits.
  virtual void stop_waiting() noexcept {}
  // All nodes were issued, or a node failed. No stream waits for a host node from here on.
  virtual void end(bool good)                         = 0;
  [[nodiscard]] virtual bool done()                   = 0;  // the device is done; throws Error(backend) if it failed
  [[nodiscard]] virtual std::vector<NodeTime> times() = 0;

  // While a run is under way. How many of its nodes the device has done, at least; none: the device cannot tell. And
  // the lanes whose work is not done, where the device can tell.
  [[nodiscard]] virtual std::optional<std::uint64_t> num_done() = 0;
  [[nodiscard]] virtual std::vector<Lane> unfinished()          = 0;
  // The run was stopped, and the device has not finished in time. From now on the device keeps `program`, which owns
  // this object and the memory of the run, and itself, for the life of the process: it may still use them. Later runs
  // on it throw Error(backend).
  virtual void abandon(std::shared_ptr<void> program) noexcept = 0;
};

// How far a run is on a device that can tell, also in a replayed run.
struct DeviceProgress {
  std::vector<Node> parts_entered = {};     // begun and not ended; parts that are issued together begin together
  bool computes                   = false;  // another node has begun and not ended
  std::uint64_t num_done          = 0;      // nodes, at least
  std::optional<Node> last_done   = {};     // of these, the last in the issue order
};

class Device {
 public:
  virtual ~Device()                                                                               = default;
  [[nodiscard]] virtual DeviceMemory& memory()                                                    = 0;
  [[nodiscard]] virtual std::unique_ptr<DeviceStreams> lower(const Graph& graph, StreamPlan plan) = 0;

  // Of the run that was begun last, where the device can tell. Any thread may ask.
  [[nodiscard]] virtual std::optional<DeviceProgress> progress() { return std::nullopt; }
  // Between runs: a device that replays captured runs forgets them, and issues the next run of every program node by
  // node. A world asks for it before it gives up communicators that captured runs use.
  virtual void drop_captures() {}
};

}  // namespace stepgraph
