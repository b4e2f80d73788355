#pragma once
#include <cstdint>
#include <string>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// The end of a step whose loss was scaled, so that its gradients fit into f16: a step that overflowed is not counted
// and halves the scale; after so many good ones in a row it doubles. A node without a lane, and the same on every rank,
// as the norm that `overflow` comes from is.
struct UpdateLossScale {
  std::string name          = "loss scale";
  Access overflow           = {};    // one i64, of clip_factor: not 0 where the step is skipped
  Access scale              = {};    // one f64: of the next step from here on
  Access good_steps         = {};    // one i64: since the scale changed, or a step was skipped
  Access num_updates        = {};    // one i64: good steps in all, which AdamW counts
  bool dynamic              = true;  // false: the scale stays
  std::int64_t growth_steps = 2000;
  Labels labels             = {};
};
Node update_loss_scale(Graph& graph, const UpdateLossScale& spec);

}  // namespace stepgraph
