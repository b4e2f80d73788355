#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/error.hpp"
#include "engine/graph.hpp"
#include "engine/memory_plan.hpp"

namespace stepgraph {

// Bytes of another memory that a persistent buffer takes for its own, so that one graph works on what another keeps.
struct Loan {
  Buffer buffer              = {};
  std::span<std::byte> bytes = {};  // as many as the buffer has, and nobody else's in the same graph
};

// The bytes behind a graph's buffers, zeroed when made: one arena per rank and space, which never moves. Tokens have no
// bytes. A graph that is built anew for every step keeps its persistent bytes by running on the same Memory: the
// buffers, and where they lie, must then be the same. Moves; spans are valid while it lives. Which threads may touch
// which bytes is what the graph's edges say.
class Memory {
 public:
  explicit Memory(const Graph& graph);                 // every buffer has bytes of its own
  Memory(const Graph& graph, const MemoryPlan& plan);  // exactly the plan's arenas
  // The same, but some buffers lie elsewhere, and their places stay empty. Whoever lends must outlive this memory, and
  // the graphs of both must not run at once.
  Memory(const Graph& graph, const MemoryPlan& plan, std::span<const Loan> loans);

  // Refuses a step buffer that shares bytes: between runs they are somebody else's.
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

  // Where a buffer lies, shared or not: for the engine and its worlds.
  [[nodiscard]] std::byte* data(Buffer buffer) const { return places_[buffer.id].data; }

 private:
  struct Free {
    std::size_t mapped;  // 0: from the heap
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
  [[nodiscard]] std::string describe(Buffer buffer) const;
  [[nodiscard]] static Block allocate(std::size_t size);  // null: there is no memory
  [[nodiscard]] const Arena* find(Rank rank, Space space) const;

  Graph graph_;  // for names
  std::vector<Arena> arenas_;
  std::vector<Place> places_;  // one per buffer
};

}  // namespace stepgraph
