#pragma once
#include <cstdint>

#include "ops/tensor.hpp"

// Causal attention of one sequence and one key and value head with the query heads that look at it, on the CPU.
// Probabilities exist for a few query rows at a time; backward computes them again from the sums that forward saved.
namespace stepgraph::cpu {

struct AttentionShape {
  std::int64_t seq       = 1;
  std::int64_t heads     = 1;
  std::int64_t kv_heads  = 1;
  std::int64_t head_size = 1;
  double scale           = 1;

  [[nodiscard]] std::int64_t qkv_row() const { return (heads + 2 * kv_heads) * head_size; }
  [[nodiscard]] std::int64_t out_row() const { return heads * head_size; }
};

// qkv and out are rows of all heads, log_sums one number for each position and head; all from the first sequence on.
template <class T>
struct AttentionForward {
  AttentionShape shape;
  const T* qkv;
  T* out;
  T* log_sums;  // log of the sum of exp(q k * scale) over the keys a query sees
};
template <class T>
void attention_forward(const AttentionForward<T>& attention, std::int64_t sequence, std::int64_t kv_head, T* workspace);

template <class T>
struct AttentionBackward {
  AttentionShape shape;
  const T* qkv;
  const T* out;
  const T* log_sums;
  const T* d_out;
};
template <class T>
void attention_backward(const AttentionBackward<T>& attention, const Into<T>& d_qkv, std::int64_t sequence,
                        std::int64_t kv_head, T* workspace);

// Elements of the workspace of one call.
[[nodiscard]] std::int64_t attention_forward_workspace(const AttentionShape& shape);
[[nodiscard]] std::int64_t attention_backward_workspace(const AttentionShape& shape);

}  // namespace stepgraph::cpu
