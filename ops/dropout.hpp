#pragma once
#include <string>

#include "ops/tape/tape.hpp"

namespace stepgraph {

// Elements set to zero at random while a model trains: each with probability `rate`, the others times 1 / (1 - rate).
// Which they are is a matter of the run's seed, the step, the site and an element's place in the unsharded tensor
// alone: the same in every layout, schedule and recomputation. On a tape that is not random nothing is dropped.
struct Dropout {
  double rate      = 0;   // at least 0, less than 1
  std::string site = {};  // a name for the place in the model, no other's: "layers.3.attention"
};

// x with elements dropped; x itself where nothing is.
[[nodiscard]] Tensor dropout(Tape& tape, const Tensor& x, const Dropout& spec);

}  // namespace stepgraph
