#pragma once
#include "engine/run/world.hpp"
#include "tools/stepgraph/train/options.hpp"

namespace stepgraph::cli {

// Trains in a world, in each of its processes: prints lines, writes checkpoints, logs and the model. Throws Error, and
// Interrupted or OutputClosed if the run has ended early.
void train_in(World& world, const TrainOptions& options, const Config& config);

}  // namespace stepgraph::cli
