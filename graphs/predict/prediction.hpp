#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/graph/timeline.hpp"
#include "engine/plan/memory_plan.hpp"
#include "graphs/predict/calibration.hpp"
#include "graphs/predict/cluster.hpp"
#include "graphs/schedule/graph.hpp"
#include "graphs/step/training_step.hpp"

namespace stepgraph {

// A training step that is predicted, not run: the graph and memory plan that a Trainer of the same model, plan and
// batch would run, and the predicted times of all nodes.
struct StepPrediction {
  StepGraph step;
  MemoryPlan plan;
  Timeline timeline;
  double tokens_per_s                 = 0;
  std::vector<std::string> unmeasured = {};  // ops without a calibration
  [[nodiscard]] double makespan_s() const noexcept { return timeline.makespan_s; }
  // Of one step: of an asynchronous window, the mean.
  [[nodiscard]] double step_s() const noexcept {
    return timeline.makespan_s / static_cast<double>(step.window.empty() ? 1 : step.window.size());
  }
  [[nodiscard]] std::int64_t peak_bytes() const;  // of the rank that needs most
  [[nodiscard]] Rank peak_rank() const;           // that rank; of equals, the first
  [[nodiscard]] std::int64_t host_bytes() const;  // of what is offloaded, of the rank that has most there ...
  [[nodiscard]] std::int64_t disk_bytes() const;  // ... and on disk
};
// On a measured machine, and on the first devices of a described cluster, where layout.devices_per_node is that of the
// cluster. Algorithm::adaptive chooses for options.machine, or for the machine of the prediction where it is null. The
// memory plan has options.workspaces. With the offload_rates of a calibration of a device, offload and layers are
// chosen on it, unless options.simulator is given. On a cluster updates are divided by its own offload_rates, unless
// options.offload_rates are given.
[[nodiscard]] StepPrediction predict_step(const Model& model, const Plan& plan, const BatchSpec& batch,
                                          const Calibration& calibration, const StepOptions& options = {});
[[nodiscard]] StepPrediction predict_step(const Model& model, const Plan& plan, const BatchSpec& batch,
                                          const Cluster& cluster, const StepOptions& options = {});

// The time of a microbatch on each stage of a measured or simulated step, on one rank of the stage. Recomputation
// counts as input gradient, which waits for it.
[[nodiscard]] std::vector<Costs> stage_costs(const StepGraph& step, const Timeline& timeline);

// The bubble rate of the step's schedule with these stage times, if every rank had a device of its own.
[[nodiscard]] double pipeline_bubble(const StepGraph& step, const Timeline& timeline);
[[nodiscard]] double pipeline_bubble(const StepGraph& step, const std::vector<Costs>& stage_costs);
// The bubble rate of the run itself: as ScheduleTimeline::bubble_rate, from the compute nodes of each rank. Ranks that
// share workers wait for each other, too.
[[nodiscard]] double measured_bubble(const StepGraph& step, const Timeline& timeline);
// The share of the devices' time in which they compute: less than 1 also where stages are not equally long.
[[nodiscard]] double pipeline_efficiency(const StepGraph& step, const std::vector<Costs>& stage_costs);

}  // namespace stepgraph
