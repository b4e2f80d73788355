#pragma once
#include <optional>

#include "ops/tape/tape.hpp"

namespace stepgraph {

// Adds up, in `loss`, -log softmax(logits)[target] over all rows; gradients are those of that sum times `scale`. Tensor
// parallel: this rank has the columns from `vocab_begin` on, ranks in their order, and all ranks get the same sum. A
// target outside the vocabulary fails the step: Error(run) with its position and value.
struct CrossEntropy {
  Tensor logits            = {};  // [rows, columns]
  Tensor targets           = {};  // [rows], i32: of the whole vocabulary
  Access loss              = {};  // where the sum is written: one f64
  double scale             = 1;
  std::int64_t vocab_begin = 0;
  // Nobody else reads the logits from here on: on a tape that records, their gradient takes their place. With one
  // tensor-parallel rank it is made in the forward pass, by the node that has the exponentials at hand.
  bool in_place = false;
  // One f64, read by the node that makes the gradient: what that is multiplied with beside `scale`, so that it fits
  // into f16. The loss is not.
  std::optional<Access> loss_scale = {};
};
void cross_entropy(Tape& tape, const CrossEntropy& spec);

}  // namespace stepgraph
