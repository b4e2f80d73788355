#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// Updates the loss scale at the end of a step. The loss is scaled so that gradients fit into f16. A step that
// overflowed is not counted and halves the scale; after `growth_steps` good steps in a row the scale doubles. A node
// without a lane. The result is the same on every rank, because `overflow` comes from the global norm.
struct UpdateLossScale {
  std::string name          = "loss scale";
  Access overflow           = {};    // one i64, from clip_factor: not 0 if the step is skipped
  Access scale              = {};    // one f64: updated for the next step
  Access good_steps         = {};    // one i64: since the scale last changed or a step was skipped
  Access num_updates        = {};    // one i64: number of good steps, which AdamW uses as its step count
  bool dynamic              = true;  // false: the scale is constant
  std::int64_t growth_steps = 2000;
  Labels labels             = {};
};
Node update_loss_scale(Graph& graph, const UpdateLossScale& spec);

// The same where a step applies the gradients of an earlier step, which have a clip factor and a loss scale of their
// own. An update is counted when it is applied. A set that overflowed (its factor is NaN) halves the scale when it
// would have been applied. A set that is empty (its scale is NaN) changes nothing.
struct CountUpdate {
  std::string name                 = "count update";
  Access factor                    = {};  // one f64, from clip_factor
  Access set_scale                 = {};  // one f64: the loss scale of the gradients; 1 without loss scaling
  Access num_updates               = {};  // one i64
  std::optional<Access> scale      = {};  // one f64: the loss scale of the next step. Set both, or neither
  std::optional<Access> good_steps = {};  // one i64
  bool dynamic                     = true;
  std::int64_t growth_steps        = 2000;
  Labels labels                    = {};
};
Node count_update(Graph& graph, const CountUpdate& spec);

}  // namespace stepgraph
