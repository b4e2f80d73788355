#pragma once
#include <string>
#include <vector>

#include "engine/graph/timeline.hpp"
#include "graphs/train/step_run.hpp"

namespace stepgraph::cli {

// Figures of one measured step.
struct StepSummary {
  double step_s       = 0;
  double workers_busy = 0;  // share of the step, over all workers
  double hidden       = 0;  // share of the communication during which the same rank computed
  double bubble       = 0;  // of the pipeline, simulated with one device per rank and the measured times of stages
  std::int64_t planned_bytes = 0;  // of the largest arena of a rank
  std::int64_t used_bytes    = 0;  // the most that was written in one; memory was poisoned before the run
};
[[nodiscard]] StepSummary summarize_step(const StepRun& run, const Timeline& timeline);
[[nodiscard]] std::string to_text(const StepSummary& summary);
[[nodiscard]] std::string to_json(const StepSummary& summary);

}  // namespace stepgraph::cli
