#pragma once
#include "ops/tape/tape.hpp"

namespace stepgraph {

// Each row of x less its mean, over its deviation, times weight plus bias.
struct LayerNorm {
  Tensor x      = {};
  Weight weight = {};  // [width]
  Weight bias   = {};  // [width]
  double eps    = 1e-5;
};
[[nodiscard]] Tensor layer_norm(Tape& tape, const LayerNorm& spec);

// Each row of x over its root mean square, times weight.
struct RmsNorm {
  Tensor x      = {};
  Weight weight = {};  // [width]
  double eps    = 1e-6;
};
[[nodiscard]] Tensor rms_norm(Tape& tape, const RmsNorm& spec);

}  // namespace stepgraph
