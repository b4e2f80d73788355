#pragma once
#include <string>
#include <vector>

#include "engine/graph/timeline.hpp"
#include "graphs/train/step_run.hpp"

namespace stepgraph::cli {

// What one measured step was like.
struct StepSummary {
  double step_s       = 0;
  double workers_busy = 0;  // share of the step, over all workers
  double hidden       = 0;  // share of communication that ran beside the same rank's compute
  double bubble = 0;  // of the pipeline, if every rank had a device of its own on which stages take what they took
  std::int64_t planned_bytes = 0;  // of the rank with the largest arena ...
  std::int64_t used_bytes    = 0;  // ... and how much of one was ever written: memory was poisoned before
};
[[nodiscard]] StepSummary summarize_step(const StepRun& run, const Timeline& timeline);
[[nodiscard]] std::string to_text(const StepSummary& summary);
[[nodiscard]] std::string to_json(const StepSummary& summary);

}  // namespace stepgraph::cli
