#pragma once
#include <string_view>

#include "ops/tape/tape.hpp"

// Argument checks of ops. Internal to ops/. Each throws Error(config) that names the op, the argument and both shapes.
namespace stepgraph {

// The tensor belongs to this tape and has its type.
void check_tensor(const Tape& tape, std::string_view op, std::string_view name, const Tensor& tensor);
void check_same_shape(std::string_view op, std::string_view name, const TensorShape& shape,
                      const TensorShape& expected);
// An i32 tensor of `count` elements.
void check_indices(const Tape& tape, std::string_view op, std::string_view name, const Tensor& tensor,
                   std::int64_t count);

// One element of the given type.
void check_number(const Graph& graph, std::string_view op, std::string_view name, const Access& number, DType type);

// This rank's rows of a vocabulary that is split over the tensor-parallel ranks in order. No rank knows the whole size,
// but an index outside the vocabulary is below the first shard or past the last one, so the first or the last rank
// detects it.
struct VocabShard {
  std::int64_t begin = 0, size = 0;
  bool last = true;
  // The row of index i in this shard, or -1 if i belongs to another shard. Throws Error(run), naming `position`, if i
  // is outside the vocabulary as far as this rank can tell.
  [[nodiscard]] std::int64_t find(std::string_view what, std::int32_t i, std::int64_t position) const;
};
[[nodiscard]] VocabShard vocab_shard(const Tape& tape, std::string_view op, std::int64_t begin, std::int64_t size);

}  // namespace stepgraph
