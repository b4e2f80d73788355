#include "graphs/predict/prediction.hpp"

#include <algorithm>
#include <set>

#include "engine/simulate/simulate.hpp"
#include "graphs/schedule/simulation.hpp"

namespace stepgraph {
namespace {

// The step's schedule without the actions that lowering added. The plan's schedule can be a file that no longer exists.
PipelineSchedule without_transfers(PipelineSchedule schedule) {
  for (std::vector<Action>& row : schedule.rows)
    std::erase_if(row, [](const Action& action) { return !is_compute(action.kind); });
  return schedule;
}

StepPrediction predict(const Model& model, const Plan& plan, const BatchSpec& batch, const Machine& machine,
                       StepOptions options) {
  if (options.machine == nullptr) options.machine = &machine;
  StepPrediction out{.step         = training_step(model, plan, batch, options),
                     .plan         = {},
                     .timeline     = {},
                     .tokens_per_s = 0,
                     .unmeasured   = {}};
  out.plan     = plan_memory(out.step.graph,
                             {.reuse = plan.reuse, .issue_order = options.issue_order, .workspaces = options.workspaces});
  out.timeline = simulate({out.step.graph, out.plan}, machine);
  if (out.makespan_s() > 0)
    out.tokens_per_s = static_cast<double>(std::int64_t{batch.global} * batch.seq) / out.makespan_s();
  return out;
}

}  // namespace

Rank StepPrediction::peak_rank() const {
  Rank most{0};
  for (int rank = 0; rank < step.layout.num_ranks(); ++rank) {
    if (plan.device_bytes(Rank{rank}) > plan.device_bytes(most)) most = Rank{rank};
  }
  return most;
}

std::int64_t StepPrediction::peak_bytes() const { return plan.device_bytes(peak_rank()); }

namespace {

std::int64_t largest_arena(const MemoryPlan& plan, Space space) {
  std::int64_t most = 0;
  for (const ArenaPlan& arena : plan.arenas)
    if (arena.space == space) most = std::max(most, arena.size_bytes);
  return most;
}

}  // namespace

std::int64_t StepPrediction::host_bytes() const { return largest_arena(plan, Space::pinned); }
std::int64_t StepPrediction::disk_bytes() const { return largest_arena(plan, Space::disk); }

StepPrediction predict_step(const Model& model, const Plan& plan, const BatchSpec& batch,
                            const Calibration& calibration, const StepOptions& options) {
  StepPrediction out =
      predict(model, plan, batch, calibrated_machine(calibration, Layout(plan.layout).num_ranks()), options);
  std::set<std::string> unmeasured;
  for (std::uint32_t i = 0; i < out.step.graph.num_nodes(); ++i) {
    const std::string op(out.step.graph.op(Node{i}));
    if (!op.empty() && !calibration.ops.contains(op)) unmeasured.insert(op);
  }
  // A message is measured as `send`.
  if (calibration.ops.contains("send")) unmeasured.erase("recv");
  out.unmeasured.assign(unmeasured.begin(), unmeasured.end());
  return out;
}

StepPrediction predict_step(const Model& model, const Plan& given, const BatchSpec& batch, const Cluster& cluster,
                            const StepOptions& options) {
  Plan plan                    = given;
  plan.layout.devices_per_node = cluster.devices_per_node;
  return predict(model, plan, batch, cluster_machine(cluster, Layout(plan.layout).num_ranks(), plan.precision.param),
                 options);
}

std::vector<Costs> stage_costs(const StepGraph& step, const Timeline& timeline) {
  std::vector<Costs> costs(static_cast<std::size_t>(step.schedule.num_stages()), Costs{.F = 0, .I = 0, .W = 0});
  const int times = step.num_microbatches * step.layout.degree({Axis::dp, Axis::tp});
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
    const Labels labels = step.graph.labels(Node{i});
    if (labels.stage < 0 || labels.microbatch < 0 || step.graph.has_part(Node{i})) continue;
    Costs& stage = costs[static_cast<std::size_t>(labels.stage)];
    double& cost = labels.phase == "forward"                                   ? stage.F
                   : labels.phase == "backward" || labels.phase == "recompute" ? stage.I
                                                                               : stage.W;
    cost += (timeline.nodes[i].end_s - timeline.nodes[i].begin_s) / times;
  }
  return costs;
}

double pipeline_bubble(const StepGraph& step, const std::vector<Costs>& stage_costs) {
  const double rate = simulate(without_transfers(step.schedule), {.costs = stage_costs}).bubble_rate;
  return rate < 1e-9 ? 0 : rate;  // less is rounding
}
double pipeline_efficiency(const StepGraph& step, const std::vector<Costs>& stage_costs) {
  return simulate(without_transfers(step.schedule), {.costs = stage_costs}).efficiency;
}
double pipeline_bubble(const StepGraph& step, const Timeline& timeline) {
  return pipeline_bubble(step, stage_costs(step, timeline));
}

}  // namespace stepgraph
