#pragma once
#include "ops/dropout.hpp"
#include "ops/tape/tape.hpp"

namespace stepgraph {

// The heads of this rank: a row of qkv is `heads` queries, then `kv_heads` keys, then as many values, each of
// `head_size` elements. Query head h looks at key and value head h * kv_heads / heads.
struct Heads {
  std::int64_t heads     = 1;
  std::int64_t kv_heads  = 1;
  std::int64_t head_size = 1;
};

// Softmax(q k^T * scale) v inside each sequence, each position seeing itself and those before it:
// [sequences * seq, (heads + 2 kv_heads) * head_size] -> [sequences * seq, heads * head_size].
struct Attention {
  Tensor qkv      = {};
  Heads heads     = {};
  double scale    = 1;   // 1 / sqrt(head_size), as a rule
  Dropout dropout = {};  // of the probabilities
};
[[nodiscard]] Tensor attention(Tape& tape, const Attention& spec);

// Queries and keys turned by their position, in place: elements i and i + head_size / 2 of a head at position p by the
// angle p * frequencies[i], as Llama has it. Values stay as they are.
struct RotaryEmbedding {
  Tensor qkv                      = {};
  Heads heads                     = {};
  std::vector<double> frequencies = {};  // head_size / 2
};
[[nodiscard]] Tensor rotary_embedding(Tape& tape, const RotaryEmbedding& spec);

// theta^(-2 i / head_size) for i < head_size / 2.
[[nodiscard]] std::vector<double> rotary_frequencies(std::int64_t head_size, double theta);

}  // namespace stepgraph
