#pragma once
#include <string>

#include "graphs/plan/update_plan.hpp"
#include "tools/bench/training/train.hpp"

namespace stepgraph::bench {

// "asynchronous:2": a mode, and its max_staleness, which is 0 if there is none. Throws Error(config).
[[nodiscard]] UpdatePlan parse_update(const std::string& text);

// Times steps with each of options.updates, in turn, where a rank is slow. Prints on stdout.
void train_updates(const TrainOptions& options);

}  // namespace stepgraph::bench
