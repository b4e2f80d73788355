#pragma once
#include <cstdint>
#include <optional>

#include "ops/tape/tape.hpp"

namespace stepgraph {

// A target that does not count: no loss, and no gradient.
inline constexpr std::int32_t ignored_target = -1;

// The number of targets that count, for a mean over them: `all` less a number (i64) that is set before a run.
struct CountedTargets {
  std::int64_t all = 0;
  Access ignored   = {};
};

// Writes the sum over all rows of -log softmax(logits)[target] to `loss`. Gradients are those of the sum times `scale`.
// Tensor parallel: this rank holds the columns from `vocab_begin` on, ranks in order, and all ranks get the same sum.
// Any other target outside the vocabulary than ignored_target fails the step with Error(run), which names its position
// and value.
struct CrossEntropy {
  Tensor logits            = {};  // [rows, columns]
  Tensor targets           = {};  // [rows], i32: indices into the whole vocabulary
  Access loss              = {};  // output: one f64
  double scale             = 1;   // divided by the number of targets that count, if `counted` is given
  std::int64_t vocab_begin = 0;
  // Promises that no other op reads the logits after this one. On a tape that records, their gradient then overwrites
  // them. With one tensor-parallel rank the forward node writes the gradient, since it has the exponentials at hand.
  bool in_place = false;
  // One f64, read by the node that computes the gradient: a factor beside `scale` that keeps gradients in the range of
  // f16. It does not affect the loss.
  std::optional<Access> loss_scale      = {};
  std::optional<CountedTargets> counted = {};
};
void cross_entropy(Tape& tape, const CrossEntropy& spec);

}  // namespace stepgraph
