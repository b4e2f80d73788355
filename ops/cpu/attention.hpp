#pragma once
#include <cstdint>
#include <optional>

#include "ops/attention_shape.hpp"
#include "ops/dropout_mask.hpp"
#include "ops/tape/tensor.hpp"

// Causal attention on the CPU, in tiles of queries and keys: scores exist for one tile of each at a time (T. Dao,
// "FlashAttention-2"). Forward has a running maximum and sum for each query; backward computes the probabilities again
// from what forward saved. Tiles are the same whoever computes them, and an element's bits with them.
namespace stepgraph::cpu {

using stepgraph::AttentionShape;

// Dropout of probabilities. They are numbered over all sequences of the batch and the heads of all ranks.
struct AttentionDropout {
  DropoutMask mask;
  std::int64_t first_sequence = 0;
  std::int64_t first_head     = 0;
  std::int64_t all_heads      = 1;
};

// qkv and out are rows of all heads, log_sums one number for each position and head; all from the first sequence on.
template <class T>
struct AttentionForward {
  AttentionShape shape;
  const T* qkv;
  T* out;
  Wide<T>* log_sums;  // log2 of the sum of exp(q k * scale) over the keys a query sees
  std::optional<AttentionDropout> dropout = {};
};
// One sequence and one query head.
template <class T>
void attention_forward(const AttentionForward<T>& attention, std::int64_t sequence, std::int64_t head,
                       Wide<T>* workspace);

template <class T>
struct AttentionBackward {
  AttentionShape shape;
  const T* qkv;
  const T* out;
  const Wide<T>* log_sums;
  const T* d_out;
  Wide<T>* products;  // room for a number like those of log_sums each: d_out times out
  std::optional<AttentionDropout> dropout = {};
};
// One sequence and one key and value head with the query heads that look at it.
template <class T>
void attention_backward(const AttentionBackward<T>& attention, const Into<T>& d_qkv, std::int64_t sequence,
                        std::int64_t kv_head, Wide<T>* workspace);

// Wide elements of the workspace of one call. It does not grow with the sequence; only backward's does, by a panel of
// the queries' gradients, where those cannot be summed in place: in types of two bytes, and in shapes that are no whole
// blocks.
template <class T>
[[nodiscard]] std::int64_t attention_forward_workspace(const AttentionShape& shape);
template <class T>
[[nodiscard]] std::int64_t attention_backward_workspace(const AttentionShape& shape);

}  // namespace stepgraph::cpu
