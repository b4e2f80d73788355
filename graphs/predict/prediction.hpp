#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/graph/timeline.hpp"
#include "engine/plan/memory_plan.hpp"
#include "graphs/predict/calibration.hpp"
#include "graphs/schedule/graph.hpp"
#include "graphs/step/training_step.hpp"

namespace stepgraph {

// A training step before it runs: the graph and the plan that a Trainer of the same model, plan and batch would run,
// and when each of its nodes would.
struct StepPrediction {
  StepGraph step;
  MemoryPlan plan;
  Timeline timeline;
  double tokens_per_s                 = 0;
  std::vector<std::string> unmeasured = {};  // ops that the calibration does not know
  [[nodiscard]] double step_s() const noexcept { return timeline.makespan_s; }
  [[nodiscard]] std::int64_t peak_bytes() const;  // of the rank that needs most
};
[[nodiscard]] StepPrediction predict_step(const Model& model, const Plan& plan, const BatchSpec& batch,
                                          const Calibration& calibration);

// What a microbatch took on each stage of a step, measured or simulated, on one rank of those that have the stage. What
// is computed again for a backward counts with the input gradients that wait for it.
[[nodiscard]] std::vector<Costs> stage_costs(const StepGraph& step, const Timeline& timeline);

// The bubble of the step's schedule if every rank had a device of its own on which stages take what they took.
[[nodiscard]] double pipeline_bubble(const StepGraph& step, const Timeline& timeline);

}  // namespace stepgraph
