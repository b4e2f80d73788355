#pragma once
#include <string_view>

#include "ops/tape/tape.hpp"

// What ops ask of their arguments when they are added: internal to ops/. Each throws Error(config) naming the op, the
// argument and both shapes.
namespace stepgraph {

// A tensor of this tape, of its type.
void check_tensor(const Tape& tape, std::string_view op, std::string_view name, const Tensor& tensor);
void check_same_shape(std::string_view op, std::string_view name, const TensorShape& shape,
                      const TensorShape& expected);
// i32, one for each of `count`.
void check_indices(const Tape& tape, std::string_view op, std::string_view name, const Tensor& tensor,
                   std::int64_t count);

// One number of that type.
void check_number(const Graph& graph, std::string_view op, std::string_view name, const Access& number, DType type);

// A vocabulary cut into the rows of the tensor-parallel ranks, in their order. No rank knows all of it, but every index
// outside of it is outside at the first rank or at the last: that rank refuses it.
struct VocabShard {
  std::int64_t begin = 0, size = 0;
  bool last = true;
  // Where index i, the `position`-th, is in this shard; -1: in another. Throws Error(run) where it is in none.
  [[nodiscard]] std::int64_t find(std::string_view what, std::int32_t i, std::int64_t position) const;
};
[[nodiscard]] VocabShard vocab_shard(const Tape& tape, std::string_view op, std::int64_t begin, std::int64_t size);

}  // namespace stepgraph
