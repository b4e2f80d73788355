#pragma once
#include <optional>

#include "ops/dropout.hpp"
#include "ops/tape/tape.hpp"

namespace stepgraph {

// x + drop(branch + bias). The bias is that of the linear before it, which under tensor parallelism can only be added
// once the ranks' summands are.
struct Residual {
  Tensor x                   = {};
  Tensor branch              = {};
  std::optional<Weight> bias = {};  // [width]
  Dropout dropout            = {};
};
[[nodiscard]] Tensor residual(Tape& tape, const Residual& spec);

}  // namespace stepgraph
