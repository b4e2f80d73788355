#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/train/trainer.hpp"

namespace stepgraph::testing {

// A small model that transformers trained in float64 (tests/data/golden): where it starts, what it read and what came
// of it.
struct Golden {
  std::string folder;
  Model model;
  BatchSpec batch;  // micro is the test's choice
  OptimizerPlan optimizer;
  std::vector<std::int32_t> tokens;
  std::vector<double> loss, grad_norm;
  std::map<std::string, std::vector<double>> gradients;  // of the first step

  [[nodiscard]] std::span<const std::int32_t> tokens_of(int step) const;
};
[[nodiscard]] const Golden& golden(const std::string& name);  // "gpt2-tiny", "llama-tiny"; read once

// A run of some steps from the golden start.
struct Trained {
  std::vector<double> loss, grad_norm;
  std::map<std::string, std::vector<double>> gradients;  // of the first step
};
[[nodiscard]] Trained train(const Golden& golden, const Plan& plan, int micro, int steps, int threads = 2);
[[nodiscard]] Trained train(const Golden& golden, const Plan& plan, int micro, int steps, World& world,
                            int threads = 2);

// Largest relative differences from the golden run; of gradients, that of a whole tensor.
struct GoldenErrors {
  double loss = 0, norm = 0, gradient = 0;
};
// Checks that a run of so many steps is as close as an fp32 run is to be.
GoldenErrors check_golden_bounds(const Golden& golden, const Trained& trained, int steps);

}  // namespace stepgraph::testing
