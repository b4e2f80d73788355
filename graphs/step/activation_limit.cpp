#include <algorithm>

#include "graphs/schedule/kinds.hpp"
#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/memory_requirement.hpp"
#include "graphs/step/pipeline.hpp"

namespace stepgraph {
namespace {

// All F, then all I, then all W, so all microbatches are held at once. The search counts them until the end of W.
PipelineSchedule all_held(int pp, int chunks, int microbatches) {
  PipelineSchedule schedule{.rows             = std::vector<std::vector<Action>>(static_cast<std::size_t>(pp)),
                            .rank_of_stage    = chunks == 2 && pp > 1 ? v_placement(pp) : looped_placement(pp, chunks),
                            .num_microbatches = microbatches};
  const int num_stages = schedule.num_stages();
  const auto add       = [&](int stage, ActionKind kind) {
    const auto rank = static_cast<std::size_t>(index(schedule.rank_of_stage[static_cast<std::size_t>(stage)]));
    for (int i = 0; i < microbatches; ++i) schedule.rows[rank].push_back({Stage{stage}, kind, Microbatch{i}});
  };
  for (int stage = 0; stage < num_stages; ++stage) add(stage, ActionKind::forward);
  for (int stage = num_stages - 1; stage >= 0; --stage) add(stage, ActionKind::input_gradient);
  for (int stage = num_stages - 1; stage >= 0; --stage) add(stage, ActionKind::weight_gradient);
  return schedule;
}

// Bytes of a pipeline rank's activations at the peak of a step. The plan has a schedule. Its homes are not counted:
// whatever can be offloaded is on the device.
std::int64_t activation_bytes(const Model& model, Plan plan, const BatchSpec& batch, int pp) {
  plan.offload = {};
  if (plan.recompute == Recompute::automatic) plan.recompute = Recompute::none;
  const Rank rank      = Layout(plan.layout).rank({.pp = pp});
  const StepGraph step = build_training_step(model, plan, batch, {.only = rank});
  return memory_requirement(step, rank, {.reuse = plan.reuse})[MemoryRole::activations];
}

// The same if so many microbatches are held at once.
double bytes_of_held(const Model& model, Plan plan, const BatchSpec& batch, int pp, int held) {
  plan.pipeline.schedule = "auto";
  plan.pipeline.found =
      std::make_shared<const PipelineSchedule>(all_held(plan.layout.pp, num_chunks(plan.pipeline), held));
  plan.layout.dp = 1;
  plan.shard     = {};
  const BatchSpec all{.global = held * batch.micro, .micro = batch.micro, .seq = batch.seq};
  return static_cast<double>(activation_bytes(model, std::move(plan), all, pp));
}

}  // namespace

double activation_limit(const Model& model, const Plan& plan, const BatchSpec& batch) {
  if (plan.pipeline.limit_bytes == 0) return plan.pipeline.limit;
  const auto limit = static_cast<double>(plan.pipeline.limit_bytes);
  double units     = unlimited;
  for (int pp = 0; pp < plan.layout.pp; ++pp) {
    const double one  = bytes_of_held(model, plan, batch, pp, 1);
    const double more = std::max(1.0, (bytes_of_held(model, plan, batch, pp, 3) - one) / 2);  // of each further one
    units             = std::min(units, 1 + (limit - one) / more);
  }
  return std::max(1.0, units);
}

PlannedActivations planned_activations(const Model& model, const Plan& plan, const BatchSpec& batch) {
  PlannedActivations most;
  for (int pp = 0; pp < plan.layout.pp; ++pp) {
    const std::int64_t bytes = activation_bytes(model, plan, batch, pp);
    if (bytes > most.bytes) most = {bytes, pp};
  }
  return most;
}

}  // namespace stepgraph
