#pragma once
#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"

// From the plan that a user gives to the plan that a step is built from: internal to graphs/.
namespace stepgraph {

// The plan of a step, as the builder follows it: settings that cannot have an effect are off. With dp 1 nothing is
// sharded; a forward step has no sequence parallelism, and drops gathered weights after each use. Throws Error(config)
// where model, plan and batch do not fit together. A resolved plan resolves to itself.
[[nodiscard]] Plan resolve(const Plan& plan, const Model& model, const BatchSpec& batch, bool trains);

// Microbatches of each data-parallel rank. Throws Error(config) where the batch does not divide.
[[nodiscard]] int microbatches_of(const Plan& plan, const BatchSpec& batch);

}  // namespace stepgraph
