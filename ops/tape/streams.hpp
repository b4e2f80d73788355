#pragma once
#include <cstddef>
#include <cstdint>

#include "engine/graph/body.hpp"
#include "engine/graph/graph.hpp"
#include "engine/run/context.hpp"

// Local operations on bytes. Internal to ops/ and graphs/. Accesses of any ranges or rows are concatenated, so
// both sides of a copy or a reduction may be cut differently.
namespace stepgraph {

// The number of accesses in each list that hold bytes. Tokens, which only order the node, come after them.
struct StreamCounts {
  std::size_t reads = 0, writes = 0, accumulates = 0;
};

[[nodiscard]] Body copy_body(StreamCounts counts);                                     // writes = reads
[[nodiscard]] Body reduce_body(StreamCounts counts, DType type, Reduction reduction);  // accumulates op= reads
[[nodiscard]] Body divide_body(StreamCounts counts, DType type, std::int64_t count);   // accumulates /= count

[[nodiscard]] std::int64_t num_bytes(const Graph& graph, const AccessList& accesses);
[[nodiscard]] std::int64_t num_bytes(const Graph& graph, const Access& access);

// Bytes [begin, begin + length) of concatenated accesses.
[[nodiscard]] AccessList cut(const Graph& graph, const AccessList& accesses, std::int64_t begin, std::int64_t length);

}  // namespace stepgraph
