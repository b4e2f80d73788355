#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/error.hpp"
#include "engine/graph.hpp"

namespace stepgraph {

// The bytes behind a graph's buffers, zeroed when made. Tokens have none. A graph that is built anew for every step
// keeps its persistent bytes by running on the same Memory: the buffers must then be the same, in the same order.
// Moves; spans are valid while it lives. Which threads may touch which bytes is what the graph's edges say.
class Memory {
 public:
  explicit Memory(const Graph& graph);

  [[nodiscard]] std::span<std::byte> bytes(Buffer buffer) const;
  template <class T>
  [[nodiscard]] std::span<T> span(Buffer buffer) const {
    const std::span<std::byte> raw = bytes(buffer);
    if (raw.size() % sizeof(T) != 0) {
      throw Error(ErrorKind::config, str("memory: buffer #", buffer.id, " of ", raw.size(),
                                         " bytes is not whole elements of ", sizeof(T)));
    }
    return {reinterpret_cast<T*>(raw.data()), raw.size() / sizeof(T)};
  }

  [[nodiscard]] std::int64_t size_bytes(Rank rank) const;  // of this rank's arena
  void check_fits(const Graph& graph) const;               // throws Error(config) when the buffers differ

 private:
  struct Free {
    void operator()(std::byte* block) const noexcept;
  };
  struct Place {
    std::byte* data;
    std::int64_t size_bytes;
  };
  std::vector<std::unique_ptr<std::byte, Free>> arenas_;  // one per rank
  std::vector<std::int64_t> arena_sizes_;
  std::vector<Place> places_;  // one per buffer
};

}  // namespace stepgraph
