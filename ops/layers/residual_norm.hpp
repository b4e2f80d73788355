#pragma once
#include <optional>

#include "ops/layers/residual.hpp"

namespace stepgraph {

// y = x + drop(branch + bias) and the norm of y, in one pass over the rows. Backward, one pass completes the gradient
// of y, from which the gradients of x and of the branch follow. Same bits as `residual` followed by `layer_norm` or
// `rms_norm`.
struct ResidualNorm {
  Tensor x                        = {};
  Tensor branch                   = {};
  std::optional<Weight> bias      = {};  // [width]
  Weight norm_weight              = {};  // [width]
  std::optional<Weight> norm_bias = {};  // [width]; present: layer norm, absent: RMS norm
  double eps                      = 1e-5;
  Dropout dropout                 = {};
};
struct ResidualNormed {
  Tensor y, normed;
};
[[nodiscard]] ResidualNormed residual_norm(Tape& tape, const ResidualNorm& spec);

}  // namespace stepgraph
