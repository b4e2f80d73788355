#pragma once
#include <cstdint>

#include "graphs/models/model.hpp"
#include "ops/layers/activation.hpp"

namespace stepgraph {

// The GPT-2 family: learned positions, layer norm before each half of a layer, one MLP with GELU.
struct Gpt2Spec {
  int layers                    = 4;
  std::int64_t width            = 256;
  std::int64_t heads            = 8;
  std::int64_t context          = 128;
  std::int64_t vocab            = 4096;
  std::int64_t inner            = 0;  // 0: 4 * width
  Gelu activation               = Gelu::tanh;
  double eps                    = 1e-5;
  double init_deviation         = 0.02;   // of fresh weights; divided by sqrt(2 * layers) for weights that end a branch
  bool tied                     = true;   // the head's weight is the embedding's
  bool scale_attention          = true;   // by 1 / sqrt(head size)
  bool scale_attention_by_layer = false;  // and by 1 / (layer + 1)
  double dropout                = 0;      // while training: of embeddings, attention weights and both branches
  friend bool operator==(const Gpt2Spec&, const Gpt2Spec&) = default;
};
[[nodiscard]] Model gpt2(const Gpt2Spec& spec);

}  // namespace stepgraph
