#pragma once
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "engine/graph/edges.hpp"
#include "engine/graph/graph.hpp"

namespace stepgraph::testing {

// Draws that are the same on every platform, unlike the standard distributions.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  [[nodiscard]] std::uint64_t below(std::uint64_t limit) { return engine_() % limit; }
  [[nodiscard]] std::int64_t between(std::int64_t low, std::int64_t high) {  // both included
    return low + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(high - low + 1)));
  }
  [[nodiscard]] bool chance(int percent) { return between(1, 100) <= percent; }
  template <class T>
  [[nodiscard]] const T& pick(const std::vector<T>& from) {
    return from[below(from.size())];
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
  }

 private:
  std::mt19937_64 engine_;
};

struct RandomGraphOptions {
  int max_ranks            = 4;
  int min_nodes            = 4;  // in total; communication may exceed the drawn size by two nodes
  int max_nodes            = 7;
  int max_buffers_per_rank = 3;
  int min_accesses         = 0;  // of a node that is not a part

  // Small enough for the oracle: many ranks with little on each, or much traffic on one buffer.
  [[nodiscard]] static RandomGraphOptions small() { return {}; }
  [[nodiscard]] static RandomGraphOptions dense() {
    return {.max_ranks = 2, .min_nodes = 6, .max_nodes = 8, .max_buffers_per_rank = 1, .min_accesses = 1};
  }
  [[nodiscard]] static RandomGraphOptions medium() {
    return {.min_nodes = 20, .max_nodes = 300, .max_buffers_per_rank = 6};
  }
};

// A sound graph: it never reads unwritten step memory, its parts match, and the issue positions of all ranks are
// projections of one global order (not always the order of adding). Contains ranks, lanes, persistent and step buffers,
// tokens, whole, contiguous and strided accesses, empty nodes, and all kinds of parts, alone and issued together.
[[nodiscard]] Graph random_graph(std::uint64_t seed, const RandomGraphOptions& options = {});

}  // namespace stepgraph::testing
