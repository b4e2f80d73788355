#pragma once
#include <vector>

#include "tools/bench/training/train.hpp"
#include "tools/bench/training/training.hpp"

namespace stepgraph::bench {

// Training steps over processes, of which this is one: all run it at the same time. In turn with them, process 0 trains
// the same layout on loopback, with the threads of all processes, while the others wait. Process 0 prints.
void process_train(const std::vector<TrainingCase>& cases, const TrainOptions& options);

}  // namespace stepgraph::bench
