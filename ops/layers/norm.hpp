#pragma once
#include "ops/tape/tape.hpp"

namespace stepgraph {

// (x - mean) / deviation * weight + bias, row by row.
struct LayerNorm {
  Tensor x      = {};
  Weight weight = {};  // [width]
  Weight bias   = {};  // [width]
  double eps    = 1e-5;
};
[[nodiscard]] Tensor layer_norm(Tape& tape, const LayerNorm& spec);

// x / root mean square * weight, row by row.
struct RmsNorm {
  Tensor x      = {};
  Weight weight = {};  // [width]
  double eps    = 1e-6;
};
[[nodiscard]] Tensor rms_norm(Tape& tape, const RmsNorm& spec);

}  // namespace stepgraph
