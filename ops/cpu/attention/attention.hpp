#pragma once
#include <cstdint>
#include <optional>

#include "ops/shared/attention_shape.hpp"
#include "ops/shared/dropout_mask.hpp"
#include "ops/tape/tensor.hpp"

// Causal attention on the CPU, in tiles of queries and keys: only the scores of one tile pair exist at a time (T. Dao,
// "FlashAttention-2"). Forward keeps a running maximum and sum per query. Backward recomputes the probabilities from
// the values that forward saved. Tiles, and therefore the bits of each element, do not depend on the thread.
namespace stepgraph::cpu {

using stepgraph::AttentionShape;

// Dropout of probabilities. Their indices run over all sequences of the batch and the heads of all ranks.
struct AttentionDropout {
  DropoutMask mask;
  std::int64_t first_sequence = 0;
  std::int64_t first_head     = 0;
  std::int64_t all_heads      = 1;
};

// qkv and out are rows with all heads; log_sums holds one number per position and head. All start at the first
// sequence.
template <class T>
struct AttentionForward {
  AttentionShape shape;
  const T* qkv;
  T* out;
  Wide<T>* log_sums;  // log2 of the sum of exp(q k * scale) over the keys a query attends to
  std::optional<AttentionDropout> dropout = {};
};
// Queries [first, end) of one sequence and one query head. Both are multiples of attention_part, except that the last
// part ends with the sequence. How queries are cut into parts does not change their bits.
inline constexpr std::int64_t attention_part = 128;
struct HeadPart {
  std::int64_t sequence, head;
  std::int64_t first, end;
};
template <class T>
void attention_forward(const AttentionForward<T>& attention, const HeadPart& part, Wide<T>* workspace);
// All queries of a head.
template <class T>
void attention_forward(const AttentionForward<T>& attention, std::int64_t sequence, std::int64_t head,
                       Wide<T>* workspace) {
  attention_forward(attention, HeadPart{sequence, head, 0, attention.shape.seq}, workspace);
}

template <class T>
struct AttentionBackward {
  AttentionShape shape;
  const T* qkv;
  const T* out;
  const Wide<T>* log_sums;
  const T* d_out;
  Wide<T>* products;  // scratch of the same size as log_sums: d_out times out
  std::optional<AttentionDropout> dropout = {};
};
// One sequence and one key and value head, with the query heads that use it.
template <class T>
void attention_backward(const AttentionBackward<T>& attention, const Into<T>& d_qkv, std::int64_t sequence,
                        std::int64_t kv_head, Wide<T>* workspace);

// Size of the workspace of one call, in wide elements. Short sequences need less. From 256 positions on it does not
// grow with the sequence, with one exception: backward needs a panel for the gradients of the queries if these cannot
// be summed in place. That is the case for 2-byte types and for shapes that are not whole blocks.
template <class T>
[[nodiscard]] std::int64_t attention_forward_workspace(const AttentionShape& shape);
template <class T>
[[nodiscard]] std::int64_t attention_backward_workspace(const AttentionShape& shape);

}  // namespace stepgraph::cpu
