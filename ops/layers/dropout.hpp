#pragma once
#include <string>

#include "ops/tape/tape.hpp"

namespace stepgraph {

// Random dropout during training: each element is zeroed with probability `rate`, the others are multiplied by 1 / (1 -
// rate). The mask depends only on the run's seed, the step, the site and the element's index in the unsharded tensor,
// so it is the same in every layout, schedule and recomputation. On a tape that is not random, nothing is dropped.
struct Dropout {
  double rate      = 0;   // at least 0, less than 1
  std::string site = {};  // a unique name for the place in the model: "layers.3.attention"
};

// Returns x with elements dropped, or x itself if nothing is dropped.
[[nodiscard]] Tensor dropout(Tape& tape, const Tensor& x, const Dropout& spec);

}  // namespace stepgraph
