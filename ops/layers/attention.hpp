#pragma once
#include "ops/layers/dropout.hpp"
#include "ops/tape/tape.hpp"

namespace stepgraph {

// The attention heads of this rank. A row of qkv holds `heads` queries, then `kv_heads` keys, then `kv_heads` values,
// each of `head_size` elements. Query head h uses key and value head h * kv_heads / heads.
struct Heads {
  std::int64_t heads     = 1;
  std::int64_t kv_heads  = 1;
  std::int64_t head_size = 1;
};

// Causal attention: softmax(q k^T * scale) v inside each sequence, where each position attends to itself and earlier
// positions: [sequences * seq, (heads + 2 kv_heads) * head_size] -> [sequences * seq, heads * head_size].
struct Attention {
  Tensor qkv      = {};
  Heads heads     = {};
  double scale    = 1;   // usually 1 / sqrt(head_size)
  Dropout dropout = {};  // of the probabilities
};
[[nodiscard]] Tensor attention(Tape& tape, const Attention& spec);

// Rotary position embedding of queries and keys, in place, in Llama's layout: elements i and i + head_size / 2 of a
// head at position p are rotated by the angle p * frequencies[i]. Values are unchanged.
struct RotaryEmbedding {
  Tensor qkv                      = {};
  Heads heads                     = {};
  std::vector<double> frequencies = {};  // head_size / 2
};
[[nodiscard]] Tensor rotary_embedding(Tape& tape, const RotaryEmbedding& spec);

// theta^(-2 i / head_size) for i < head_size / 2.
[[nodiscard]] std::vector<double> rotary_frequencies(std::int64_t head_size, double theta);

}  // namespace stepgraph
