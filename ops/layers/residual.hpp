#pragma once
#include <optional>

#include "ops/layers/dropout.hpp"
#include "ops/tape/tape.hpp"

namespace stepgraph {

// x + drop(branch + bias). The bias belongs to the linear before it. Under tensor parallelism it can only be added
// after the partial results of the ranks are summed.
struct Residual {
  Tensor x                   = {};
  Tensor branch              = {};
  std::optional<Weight> bias = {};  // [width]
  Dropout dropout            = {};
};
[[nodiscard]] Tensor residual(Tape& tape, const Residual& spec);

}  // namespace stepgraph
