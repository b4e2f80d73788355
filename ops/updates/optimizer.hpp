#pragma once
#include <optional>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"

// The ops that end a step: the norm of all gradients, the clip factor, and the update of each weight. Except for
// square_sum they have no lane: only their accesses order them.
namespace stepgraph {

// The size of an exact sum of squares: a fixed-point accumulator of integers. A clear sets it to 0, and two sums are
// combined by adding them element by element. Its bits depend only on the squared elements, not on how they are split
// or ordered.
[[nodiscard]] std::int64_t exact_sum_size(DType type);  // number of i64; the size for f32 also fits narrower types

// Adds the squares of all elements of `values` to the sum. `values` may be strided and of any floating-point type.
struct SquareSum {
  std::string name             = {};
  std::optional<LaneKind> lane = LaneKind::compute;  // none: only its accesses order the node
  Access values                = {};
  Access sum                   = {};  // exact_sum_size elements of i64
  Labels labels                = {};
};
Node square_sum(Graph& graph, const SquareSum& spec);

// norm = sqrt(squares), factor = min(1, clip / (norm + 1e-6)), or 1 if clip is 0. If gradients are scaled by a loss
// scale, `scale` divides both, so that norm and factor refer to unscaled gradients. If the norm is NaN or infinite, the
// factor is NaN and `overflow` is set: the step must then be skipped.
struct ClipFactor {
  std::string name = "clip";
  Access squares   = {};          // an exact sum of squares
  DType type       = DType::f32;  // of the squared elements
  Access norm      = {};          // one f64
  Access factor    = {};          // one f64
  double clip      = 0;
  Labels labels    = {};
  // Set both, or neither.
  std::optional<Access> scale    = {};  // one f64
  std::optional<Access> overflow = {};  // one i64: 1 or 0
};
Node clip_factor(Graph& graph, const ClipFactor& spec);

// Values that change from step to step are read from buffers, not captured: `factor` (f64) scales the gradient, `rate`
// (f64) is the learning rate, `step` (i64) counts from 1.
//
// Mixed precision: the model computes with `value` (bf16 or f16). The update applies to the master copy `weight` (f32)
// and writes it rounded to `value` in the same pass. The gradient of an f32 weight may also be bf16 or f16.
//
// If `factor` is NaN or `skip` (i64) is not 0, weight, running means and value are left unchanged.
struct AdamW {
  std::string name            = {};
  Access weight               = {};
  Access gradient             = {};
  Access first                = {};  // running mean of gradients, in the weight's type; zero at first
  Access second               = {};  // running mean of squared gradients
  Access factor               = {};
  Access rate                 = {};
  Access step                 = {};
  double beta1                = 0.9;
  double beta2                = 0.95;
  double eps                  = 1e-8;
  double weight_decay         = 0;  // decoupled: weight -= rate * weight_decay * weight, before the update
  Labels labels               = {};
  std::optional<Access> value = {};  // bf16 or f16, as many elements as the weight
  std::optional<Access> skip  = {};
};
Node adamw(Graph& graph, const AdamW& spec);

// velocity = momentum * velocity + (factor * gradient + weight_decay * weight); weight -= rate * velocity.
struct Sgd {
  std::string name            = {};
  Access weight               = {};
  Access gradient             = {};
  Access velocity             = {};  // zero at first
  Access factor               = {};
  Access rate                 = {};
  double momentum             = 0;
  double weight_decay         = 0;
  Labels labels               = {};
  std::optional<Access> value = {};
  std::optional<Access> skip  = {};
};
Node sgd(Graph& graph, const Sgd& spec);

}  // namespace stepgraph
