#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/run/world.hpp"
#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"

namespace stepgraph {

struct GradientCheckOptions {
  Plan plan          = {};  // layout, schedule, sharding, recomputation; its types are ignored
  BatchSpec batch    = {.global = 2, .micro = 1, .seq = 8};
  int elements       = 8;     // of each tensor, spread over it; all of a smaller one
  double tolerance   = 1e-4;  // of the relative error
  std::uint64_t seed = 1;     // of fresh weights, tokens, dropout and the choice of elements
  int threads        = 0;
};

// The element of a tensor with the largest error.
struct GradientError {
  std::string tensor   = {};
  std::int64_t element = 0;
  double analytic      = 0;  // from the backward pass
  double numeric       = 0;  // from two losses
  // Their difference, relative to the larger one. Where both are smaller than 1e-5 of the norm of all gradients, or so
  // small that rounding of the loss would count, it is relative to that bound.
  double error = 0;
};

struct GradientCheck {
  double tolerance                   = 0;
  std::int64_t num_checked           = 0;   // elements
  std::vector<GradientError> tensors = {};  // the worst element of each tensor, in the order of the model

  [[nodiscard]] bool passed() const;
  [[nodiscard]] const GradientError& worst() const;
};
// One line for each tensor above the tolerance, then one for all.
[[nodiscard]] std::string to_string(const GradientCheck& check);

// Compares the gradients of a model's backward pass with central differences of its loss, in f64: of a training step on
// random tokens, as a Trainer would run it, but without an update. Ops need kernels for f64. A model of some thousand
// weights takes about a second. Throws what training_step and a run throw; a wrong gradient is no error but a result.
[[nodiscard]] GradientCheck check_gradients(const Model& model, World& world, const GradientCheckOptions& options = {});

}  // namespace stepgraph
