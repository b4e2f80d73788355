#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/graph/graph.hpp"
#include "engine/plan/memory_plan.hpp"

namespace stepgraph {

// Bytes of another memory that a persistent buffer takes for its own, so that one graph works on what another keeps.
struct Loan {
  Buffer buffer              = {};
  std::span<std::byte> bytes = {};  // as many as the buffer has, and nobody else's in the same graph
};

class DeviceMemory;  // engine/run/device.hpp

// The bytes behind a graph's buffers, zeroed when made: one arena per rank and space, which never moves. Tokens have no
// bytes. A graph that is built anew for every step keeps its persistent bytes by running on the same Memory: the
// buffers, and where they lie, must then be the same. Moves; spans are valid while it lives. Which threads may touch
// which bytes is what the graph's edges say.
class Memory {
 public:
  // `device`: who has the bytes; null: this process's own memory. It must outlive this one.
  explicit Memory(const Graph& graph, DeviceMemory* device = nullptr);  // every buffer has bytes of its own
  Memory(const Graph& graph, const MemoryPlan& plan, DeviceMemory* device = nullptr);  // exactly the plan's arenas
  // The same, but some buffers lie elsewhere, and their places stay empty. Whoever lends must outlive this memory, and
  // the graphs of both must not run at once.
  Memory(const Graph& graph, const MemoryPlan& plan, std::span<const Loan> loans, DeviceMemory* device = nullptr);

  // Refuses a step buffer that shares bytes: between runs they are somebody else's. And one that the host does not see:
  // read() and write() copy.
  [[nodiscard]] std::span<std::byte> bytes(Buffer buffer) const;
  template <class T>
  [[nodiscard]] std::span<T> span(Buffer buffer) const {
    const std::span<std::byte> raw = bytes(buffer);
    if (raw.size() % sizeof(T) != 0) {
      throw Error(ErrorKind::config,
                  str("memory: ", describe(buffer), " has ", raw.size(), " bytes, not whole elements of ", sizeof(T)));
    }
    return {reinterpret_cast<T*>(raw.data()), raw.size() / sizeof(T)};
  }

  // Copies, wherever the buffer is: `size` elements from element `offset` of it on. What was enqueued on a device is
  // waited for.
  template <class T>
  void read(Buffer buffer, std::span<T> to, std::int64_t offset = 0) const {
    read_bytes(buffer, offset * static_cast<std::int64_t>(sizeof(T)), std::as_writable_bytes(to));
  }
  template <class T>
  void write(Buffer buffer, std::span<const T> from, std::int64_t offset = 0) const {
    write_bytes(buffer, offset * static_cast<std::int64_t>(sizeof(T)), std::as_bytes(from));
  }
  template <class T>
  [[nodiscard]] T first(Buffer buffer) const {  // its first element
    T value{};
    read(buffer, std::span<T>(&value, 1));
    return value;
  }
  template <class T>
  void set_first(Buffer buffer, T value) const {
    write(buffer, std::span<const T>(&value, 1));
  }

  [[nodiscard]] DeviceMemory* device() const noexcept { return device_; }  // who has the bytes
  // A buffer's bytes for a Loan, wherever they are.
  [[nodiscard]] std::span<std::byte> loan(Buffer buffer) const;

  [[nodiscard]] std::span<std::byte> arena(Rank rank,
                                           Space space = Space::device) const;  // empty when it holds nothing
  [[nodiscard]] std::int64_t size_bytes(Rank rank) const;                       // of all arenas of a rank

  // For finding out what is really used: fills everything that is not persistent with a pattern; afterwards the highest
  // byte that differs from it, plus one, is how much of the arena has been used.
  void poison();
  [[nodiscard]] std::int64_t used_bytes(Rank rank, Space space = Space::device) const;

  // Throws Error(config) when the buffers, or where they lie, are not those of the graph and the plan. Without a plan
  // nothing may share bytes, because nothing orders those who do.
  void check_fits(const Graph& graph, const MemoryPlan* plan = nullptr) const;

  // Where a buffer lies, shared or not, on a device or here: for the engine and its worlds, and for loans.
  [[nodiscard]] std::byte* data(Buffer buffer) const { return places_[buffer.id].data; }

 private:
  struct Free {
    std::size_t mapped;  // 0: from the heap
    DeviceMemory* device = nullptr;
    Rank rank            = {};
    Space space          = Space::device;
    void operator()(std::byte* block) const noexcept;
  };
  using Block = std::unique_ptr<std::byte, Free>;
  struct Arena {
    Rank rank;
    Space space;
    std::int64_t size_bytes, persistent_bytes;
    Block block;
    std::byte* begin;  // aligned
  };
  struct Place {
    std::byte* data;
    std::int64_t offset;  // MemoryPlan::nowhere: no bytes
    std::int64_t size_bytes;
    bool shared;
    bool lent;
  };
  void borrow(std::span<const Loan> loans);
  void read_bytes(Buffer buffer, std::int64_t offset, std::span<std::byte> to) const;
  void write_bytes(Buffer buffer, std::int64_t offset, std::span<const std::byte> from) const;
  [[nodiscard]] std::byte* within(Buffer buffer, std::int64_t offset, std::size_t size) const;
  [[nodiscard]] std::string describe(Buffer buffer) const;
  [[nodiscard]] static Block allocate(std::size_t size);  // null: there is no memory
  [[nodiscard]] const Arena* find(Rank rank, Space space) const;

  Graph graph_;  // for names
  DeviceMemory* device_ = nullptr;
  std::vector<Arena> arenas_;
  std::vector<Place> places_;  // one per buffer
};

}  // namespace stepgraph
