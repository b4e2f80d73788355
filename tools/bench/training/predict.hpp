#pragma once
#include <optional>
#include <string>
#include <vector>

namespace stepgraph::bench {

struct PredictOptions {
  std::vector<std::string> models    = {"S", "M"};
  std::vector<std::string> layouts   = {"1x1x1", "2x1x1", "1x2x1", "1x1x2", "2x2x2"};
  int steps                          = 5;
  int rounds                         = 1;  // of measuring the machine and running steps; medians are printed
  int threads                        = 2;
  std::optional<std::string> machine = {};     // a calibration file; none: measure first
  bool kernels                       = false;  // records the steps and prints the time of each kernel
  bool dry_run                       = false;
  bool json                          = false;
};

// Predicts training steps, then runs them. Prints predicted and measured times on stdout.
void predict(const PredictOptions& options);

}  // namespace stepgraph::bench
