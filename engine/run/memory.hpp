#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/graph/graph.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/run/storage.hpp"

namespace stepgraph {

static_assert(MemoryPlan::block_alignment == Storage::block_bytes);

// Bytes of another Memory that a persistent buffer uses, so that one graph works on the data of another: as many as the
// buffer has, which no other buffer of the graph uses.
struct Loan {
  Buffer buffer              = {};
  std::span<std::byte> bytes = {};
  StoredBytes stored         = {};  // instead of `bytes`, for a buffer on disk
};

class DeviceMemory;  // engine/run/device.hpp

// The bytes of a graph's buffers, zeroed when made: one arena per rank and space, which never moves; on disk, one
// Storage per rank. Tokens have no bytes. A graph that is built anew for every step keeps its persistent bytes by
// running on the same Memory; then the buffers and their places must be the same. Move-only; spans are valid while it
// lives. The graph's edges say which thread may use which bytes.
class Memory {
 public:
  // `device`: the device memory that holds the bytes, which must outlive this object; null: host memory. `make`: makes
  // the storage of buffers on disk; it is needed where there are some.
  explicit Memory(const Graph& graph, DeviceMemory* device = nullptr,
                  const MakeStorage& make = {});  // every buffer has bytes of its own
  Memory(const Graph& graph, const MemoryPlan& plan, DeviceMemory* device = nullptr,
         const MakeStorage& make = {});  // exactly the plan's arenas
  // The same, but some buffers use bytes of another Memory, and arenas are smaller by these. The other Memory must
  // outlive this one, and the graphs of both must not run at the same time.
  Memory(const Graph& graph, const MemoryPlan& plan, std::span<const Loan> loans, DeviceMemory* device = nullptr,
         const MakeStorage& make = {});

  // For a second graph with the same buffers, as a part of the first graph has: its persistent buffers use the bytes of
  // the owner's, and its step buffers the bytes of the owner's step buffers. Arenas in which these are too few are its
  // own. The owner must outlive this object, and the graphs of both must not run at the same time.
  Memory(const Graph& graph, const MemoryPlan& plan, const Memory& owner);

  // Throws for a step buffer that shares bytes, because other buffers overwrite them, and for a buffer that the host
  // cannot access, on a device or on disk: use read() and write().
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

  // Copy elements from or to the buffer, from its element `offset` on, in host or device memory or on disk. They
  // wait for work that was enqueued on a device.
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

  [[nodiscard]] DeviceMemory* device() const noexcept { return device_; }  // null: host memory
  // Lends a buffer's bytes to a buffer of another graph.
  [[nodiscard]] Loan loan(Buffer buffer, Buffer to) const;

  // Empty when it holds nothing. Throws for Space::disk.
  [[nodiscard]] std::span<std::byte> arena(Rank rank, Space space = Space::device) const;
  [[nodiscard]] std::int64_t size_bytes(Rank rank) const;  // of all arenas of a rank

  // To measure how much memory a run really uses: poison() fills all bytes that are not persistent with a pattern;
  // used_bytes() is the highest byte that differs from it, plus one.
  void poison();
  [[nodiscard]] std::int64_t used_bytes(Rank rank, Space space = Space::device) const;

  // Throws Error(config) when buffers or their places differ from those of the graph and the plan. Without a plan no
  // buffers may share bytes, because no edges order their users.
  void check_fits(const Graph& graph, const MemoryPlan* plan = nullptr) const;

  // The address of a buffer, shared or not, in host or device memory: for the engine and its worlds. Null: on disk.
  [[nodiscard]] std::byte* data(Buffer buffer) const { return places_[buffer.id].data; }
  // Where a buffer on disk lies. No storage: it is not on disk.
  [[nodiscard]] StoredBytes stored(Buffer buffer) const;

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
    Block block      = Block(nullptr, Free{0});  // null: of the owner
    std::byte* begin = nullptr;                  // aligned
    // On disk, instead of the two above.
    std::unique_ptr<Storage> own_storage = {};  // null: of the owner
    StoredBytes stored                   = {};
  };
  struct Place {
    std::byte* data         = nullptr;              // in memory
    StoredBytes stored      = {};                   // on disk
    std::int64_t offset     = MemoryPlan::nowhere;  // in the plan
    std::int64_t size_bytes = 0;
    Rank rank               = {};
    Space space             = Space::device;
    bool shared             = false;
    bool lent               = false;
  };
  Memory(const Graph& graph, const MemoryPlan& plan, std::span<const Loan> loans, DeviceMemory* device,
         const MakeStorage& make, const Memory* owner);
  [[nodiscard]] std::vector<Loan> lend_all(const Graph& to) const;
  [[nodiscard]] std::optional<Arena> borrow_arena(const ArenaPlan& plan) const;
  void check(const MemoryPlan& plan) const;
  void borrow(std::span<const Loan> loans);
  [[nodiscard]] Arena make_arena(const ArenaPlan& plan) const;
  void find_shared();
  void read_bytes(Buffer buffer, std::int64_t offset, std::span<std::byte> to) const;
  void write_bytes(Buffer buffer, std::int64_t offset, std::span<const std::byte> from) const;
  // Throws if bytes of a buffer do not exist or are shared.
  const Place& require(Buffer buffer, std::int64_t offset, std::size_t size) const;
  void read_arena(const Arena& arena, std::int64_t offset, std::span<std::byte> to) const;
  void write_arena(const Arena& arena, std::int64_t offset, std::span<const std::byte> from) const;
  [[nodiscard]] std::string describe(Buffer buffer) const;
  [[nodiscard]] static Block allocate(std::size_t size);  // null: there is no memory
  [[nodiscard]] const Arena* find(Rank rank, Space space) const;

  Graph graph_;  // for names
  DeviceMemory* device_ = nullptr;
  MakeStorage make_     = {};
  std::vector<Arena> arenas_;
  std::vector<Place> places_;  // one per buffer
};

}  // namespace stepgraph
