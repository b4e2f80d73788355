#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/look/trace.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/run/recorder.hpp"
#include "graphs/train/step_run.hpp"

// Reports about all ranks of a step, also where several processes have them. Functions that take a StepRun or a
// StepView are collective.
namespace stepgraph {

struct StepSize {
  std::int64_t nodes                   = 0;
  std::int64_t edges                   = 0;  // with reuse edges
  std::int64_t reuse_edges             = 0;
  std::vector<std::int64_t> peak_bytes = {};  // of device memory, workspaces included, by rank ...
  std::vector<std::int64_t> host_bytes = {};  // ... of host memory for what is offloaded ...
  std::vector<std::int64_t> disk_bytes = {};  // ... and on disk
};
[[nodiscard]] StepSize step_size(const StepGraph& step, const MemoryPlan& plan);  // of the ranks that the step holds
[[nodiscard]] StepSize step_size(const StepRun& run);                             // process 0: of all ranks

// How a recorded run went.
struct StepFigures {
  double step_s              = 0;  // of the slowest process; of an asynchronous window, the mean of its steps
  double workers_busy        = 0;  // share of the step, over all workers
  double hidden              = 0;  // share of the communication during which the same rank computed
  double bubble              = 0;  // of the pipeline, simulated with one device per rank and the measured times
  double efficiency          = 0;  // of the pipeline, likewise: the share of the devices' time in which they compute
  std::int64_t planned_bytes = 0;  // of the largest device arena of a rank
  std::int64_t used_bytes    = 0;  // the most that was written in one, if memory was poisoned before the run
};
[[nodiscard]] StepFigures step_figures(const StepView& run, const Timeline& timeline);  // process 0: of all ranks
[[nodiscard]] inline StepFigures step_figures(const StepRun& run, const Timeline& timeline) {
  return step_figures(run.view(), timeline);
}

// The trace of a recorded run, in one file that process 0 writes. Clocks of several machines are aligned.
void write_step_trace(const StepView& run, const Recorder& recorder, const std::string& path,
                      const TraceOptions& options = {});
inline void write_step_trace(const StepRun& run, const Recorder& recorder, const std::string& path,
                             const TraceOptions& options = {}) {
  write_step_trace(run.view(), recorder, path, options);
}

}  // namespace stepgraph
