#pragma once
#include <cstdint>

#include "graphs/models/model.hpp"

namespace stepgraph {

// The Llama family: rotary positions, RMS norm before each half of a layer, grouped key and value heads, SwiGLU.
struct LlamaSpec {
  int layers             = 4;
  std::int64_t width     = 256;
  std::int64_t heads     = 8;
  std::int64_t kv_heads  = 0;  // 0: as many as heads
  std::int64_t head_size = 0;  // 0: width / heads
  std::int64_t context   = 128;
  std::int64_t vocab     = 4096;
  std::int64_t inner     = 0;  // 0: 8/3 of the width, rounded up to a multiple of 64
  double eps             = 1e-5;
  double rope_theta      = 10000;
  double init_deviation  = 0.02;
  bool tied              = false;
  bool attention_bias    = false;  // on q, k, v and o
  bool mlp_bias          = false;
  double dropout         = 0;  // while training: of attention weights
  friend bool operator==(const LlamaSpec&, const LlamaSpec&) = default;
};
inline constexpr std::int64_t max_head_size = 1 << 16;  // each node of a rotary embedding has a table of that size
[[nodiscard]] Model llama(const LlamaSpec& spec);

}  // namespace stepgraph
