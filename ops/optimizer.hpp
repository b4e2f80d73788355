#pragma once
#include <optional>
#include <string>
#include <vector>

#include "engine/graph/graph.hpp"

// What ends a step: the norm of all gradients, the factor that clips them, and the update of each weight. Nodes without
// a lane: only their accesses order them.
namespace stepgraph {

// A sum of squares that is not rounded: integers, which a clear sets to 0 and which are added up element by element
// wherever two sums meet. So its bits depend on nothing but the elements, however they are cut and ordered.
[[nodiscard]] std::int64_t exact_sum_size(DType type);  // elements of i64; f32's does for what is narrower

// Adds the squares of all elements of `values` to the sum. `values` may be strided, and of any type but integers.
struct SquareSum {
  std::string name             = {};
  std::optional<LaneKind> lane = LaneKind::compute;  // none: only its accesses order it
  Access values                = {};
  Access sum                   = {};  // exact_sum_size elements of i64
  Labels labels                = {};
};
Node square_sum(Graph& graph, const SquareSum& spec);

// norm = sqrt(squares), factor = min(1, clip / (norm + 1e-6)), or 1 where clip is 0. Where gradients are `scale` times
// too large, both are divided by it, so that the norm is that of gradients as they should be and the factor makes them
// so; and `overflow` says whether the norm is no number, or infinite: then the step is to be skipped.
struct ClipFactor {
  std::string name = "clip";
  Access squares   = {};          // a sum of them
  DType type       = DType::f32;  // of what was squared
  Access norm      = {};          // one f64
  Access factor    = {};          // one f64
  double clip      = 0;
  Labels labels    = {};
  // Both, or neither.
  std::optional<Access> scale    = {};  // one f64
  std::optional<Access> overflow = {};  // one i64: 1 or 0
};
Node clip_factor(Graph& graph, const ClipFactor& spec);

// What changes from step to step is read, never captured: `factor` (f64) scales the gradient, `rate` (f64) is the
// learning rate, `step` (i64) counts from 1.
//
// Mixed precision: `value` (bf16 or f16) is what the model computes with; `weight` (f32), its master, is what is
// updated, and `value` gets it rounded in the same pass. The gradient of an f32 weight may be bf16 or f16 too.
//
// Where `skip` (i64) is not 0, weight, running means and value keep their bits.
struct AdamW {
  std::string name            = {};
  Access weight               = {};
  Access gradient             = {};
  Access first                = {};  // running mean of gradients, of the weight's type; zero at first
  Access second               = {};  // of their squares
  Access factor               = {};
  Access rate                 = {};
  Access step                 = {};
  double beta1                = 0.9;
  double beta2                = 0.95;
  double eps                  = 1e-8;
  double weight_decay         = 0;  // decoupled: weight -= rate * weight_decay * weight, before the rest
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
