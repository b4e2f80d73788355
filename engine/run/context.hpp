#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "engine/graph/graph.hpp"
#include "engine/run/storage.hpp"

namespace stepgraph {

struct DeviceQueue;    // engine/run/device.hpp
struct AccessRecord;   // engine/graph/graph_data.hpp
class RunningProgram;  // engine/run/program/running_program.hpp
struct TaskRecord;     // engine/run/program/running_program.hpp

// Rows of `length` elements, `stride` elements apart: the bytes of a strided access.
template <class T>
struct Rows {
  T* data;
  std::int64_t length;
  std::int64_t stride;
  std::int64_t count;
  [[nodiscard]] std::span<T> operator[](std::int64_t row) const {
    return {data + row * stride, static_cast<std::size_t>(length)};
  }
};

// A reference to the callable that computes the tiles of a kernel from `first` up to `end`.
struct TileCall {
  const void* callable                                               = nullptr;
  void (*call)(const void* of, std::int64_t first, std::int64_t end) = nullptr;
  std::int64_t joined = 0;  // about how many neighbouring tiles to compute in one call; 0: one
  void operator()(std::int64_t first, std::int64_t end) const { call(callable, first, end); }
};

// What a body gets when it runs: the memory that its node declared, by position in the declaration. So a body never
// depends on a buffer's number and cannot reach memory that was not declared. Valid during the call.
class Context {
 public:
  Context()                          = default;
  Context(const Context&)            = delete;
  Context& operator=(const Context&) = delete;

  // The i-th entry of `reads`, `writes` or `accumulates`: one range of bytes...
  template <class T = std::byte>
  [[nodiscard]] std::span<const T> read(std::size_t i = 0) const {
    const Rows<std::byte> rows = range(AccessMode::read, i, {sizeof(T), dtype_of<T>()});
    return {reinterpret_cast<const T*>(rows.data), static_cast<std::size_t>(rows.length) / sizeof(T)};
  }
  template <class T = std::byte>
  [[nodiscard]] std::span<T> write(std::size_t i = 0) const {
    const Rows<std::byte> rows = range(AccessMode::write, i, {sizeof(T), dtype_of<T>()});
    return {reinterpret_cast<T*>(rows.data), static_cast<std::size_t>(rows.length) / sizeof(T)};
  }
  template <class T = std::byte>
  [[nodiscard]] std::span<T> accumulate(std::size_t i = 0) const {
    const Rows<std::byte> rows = range(AccessMode::accumulate, i, {sizeof(T), dtype_of<T>()});
    return {reinterpret_cast<T*>(rows.data), static_cast<std::size_t>(rows.length) / sizeof(T)};
  }
  // ... or, for a strided access, its rows.
  template <class T>
  [[nodiscard]] Rows<const T> read_rows(std::size_t i = 0) const {
    return rows<const T>(AccessMode::read, i);
  }
  template <class T>
  [[nodiscard]] Rows<T> write_rows(std::size_t i = 0) const {
    return rows<T>(AccessMode::write, i);
  }
  template <class T>
  [[nodiscard]] Rows<T> accumulate_rows(std::size_t i = 0) const {
    return rows<T>(AccessMode::accumulate, i);
  }

  // For a buffer on disk, which has no addresses: where the i-th entry of `reads`, `writes` or `accumulates` lies. One
  // range of bytes.
  [[nodiscard]] StoredBytes stored(AccessMode mode, std::size_t i = 0) const;

  // Calls tile(0) to tile(num_tiles - 1), here and on other threads of the pool, and returns when all are done;
  // rethrows the first tile's exception. The node must have been declared `parallel`; a part always is. Meanwhile this
  // thread may compute tiles of other nodes: a body must not hold a lock that they take, nor must a tile wait for
  // another node. Nothing is allocated, whatever the tile captures.
  template <class Tile>
  void parallel_for(std::int64_t num_tiles, const Tile& tile) const {
    const auto call = [](const void* of, std::int64_t first, std::int64_t end) {
      for (std::int64_t i = first; i < end; ++i) (*static_cast<const Tile*>(of))(i);
    };
    run_tiles(num_tiles, {&tile, call});
  }
  // The same with tile(first, end), which computes several neighbouring tiles in one call: about `joined` of them,
  // fewer where a thread's share is small or nearly done, and up to all on a thread without helpers. For kernels that
  // save work that way and whose bits do not depend on the number.
  template <class Tile>
  void parallel_for(std::int64_t num_tiles, std::int64_t joined, const Tile& tile) const {
    const auto call = [](const void* of, std::int64_t first, std::int64_t end) {
      (*static_cast<const Tile*>(of))(first, end);
    };
    run_tiles(num_tiles, {&tile, call, joined});
  }

  // Set when the node's memory is on a device: the queue for its work. Spans are then device memory, and the body
  // returns when all its work is enqueued. The node must have been declared `device`.
  [[nodiscard]] const DeviceQueue* device() const noexcept { return device_; }

  // True once the step has failed, was cancelled or ran out of time: a long body should return.
  [[nodiscard]] bool stopping() const noexcept;

  // A body that blocks calls it, outside its tiles, with what it waits for. The text is copied, printed when the step
  // runs out of time, and forgotten when the body returns.
  void waiting_for(std::string_view what) const;
  // The same for a part that waits for another rank: for heartbeats (RunView), so it costs one store. Rank{-1}: it does
  // not wait any more.
  void waiting_for(Rank rank) const noexcept { waits_for_.store(index(rank), std::memory_order_relaxed); }

  [[nodiscard]] Node node() const noexcept;
  [[nodiscard]] Rank rank() const;

 private:
  void run_tiles(std::int64_t num_tiles, TileCall tile) const;
  struct Element {
    std::size_t size_bytes;
    std::optional<DType> type;  // none: a type of the caller
  };
  [[nodiscard]] const AccessRecord& access(AccessMode mode, std::size_t i) const;
  [[nodiscard]] Rows<std::byte> strided(AccessMode mode, std::size_t i, Element element) const;
  [[nodiscard]] Rows<std::byte> range(AccessMode mode, std::size_t i, Element element) const;
  template <class T>
  [[nodiscard]] Rows<T> rows(AccessMode mode, std::size_t i) const {
    const Rows<std::byte> bytes = strided(mode, i, {sizeof(T), dtype_of<std::remove_const_t<T>>()});
    constexpr auto element      = static_cast<std::int64_t>(sizeof(T));
    return {reinterpret_cast<T*>(bytes.data), bytes.length / element, bytes.stride / element, bytes.count};
  }

  // Each worker has one context for all nodes that it runs. Entering a node is one store, which other threads read to
  // name the nodes that run.
  friend class RunningProgram;
  friend class RunView;
  friend struct Pool;
  RunningProgram* program_   = nullptr;
  const DeviceQueue* device_ = nullptr;
  std::atomic<const TaskRecord*> task_{nullptr};
  std::atomic<std::uint64_t> num_done_{0};  // tasks of this run that have ended here
  mutable std::atomic<std::int32_t> waits_for_{-1};
};

}  // namespace stepgraph
