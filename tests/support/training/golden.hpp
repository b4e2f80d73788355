#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/train/trainer.hpp"

namespace stepgraph::testing {

// A small model that transformers trained in float64 (tests/data/golden): its start, its data and its results.
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
// A config that trains it with the command: one sequence in a microbatch, one thread.
[[nodiscard]] std::string golden_config(const std::string& name);

[[nodiscard]] const Golden& golden(const std::string& name);  // "gpt2-tiny", "llama-tiny"; read once

// The results of some steps from the golden start.
struct Trained {
  std::vector<double> loss, grad_norm;
  std::map<std::string, std::vector<double>> gradients;  // of the first step
};
[[nodiscard]] Trained train(const Golden& golden, const Plan& plan, int micro, int steps, int threads = 2);
[[nodiscard]] Trained train(const Golden& golden, const Plan& plan, int micro, int steps, World& world,
                            int threads = 2);

// The same of a run of the command: the lines of train --json, and the file of --dump-grads.
[[nodiscard]] Trained trained_by_command(const std::string& out, const std::string& gradients);

// Largest relative differences from the golden run; for gradients, of a whole tensor.
struct GoldenErrors {
  double loss = 0, norm = 0, gradient = 0;
};
[[nodiscard]] GoldenErrors golden_errors(const Golden& golden, const Trained& trained, int steps);
// Checks that a run of `steps` steps is within the bounds of an fp32 run.
GoldenErrors check_golden_bounds(const Golden& golden, const Trained& trained, int steps);

}  // namespace stepgraph::testing
