#pragma once
#include "graphs/predict/prediction.hpp"

// What `simulate` prints after its plan: the step, then its ops.
namespace stepgraph::cli {

void print_prediction(const StepPrediction& prediction, const Calibration& calibration, bool json);
void print_prediction(const StepPrediction& prediction, const Cluster& cluster, bool json);

}  // namespace stepgraph::cli
