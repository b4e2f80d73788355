#pragma once
#include "graphs/models/model.hpp"

// Models that users wrote: internal to graphs/.
namespace stepgraph {

// The model as steps are built from it: each weight has a name of its own in the whole model (see Block), and a
// tied weight has the sections of its owner. Throws Error(config) where blocks and weights do not fit together. A
// checked model checks to itself.
[[nodiscard]] Model checked_model(const Model& model);

}  // namespace stepgraph
