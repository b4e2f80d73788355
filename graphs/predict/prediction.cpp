#include "graphs/predict/prediction.hpp"

#include <algorithm>
#include <map>
#include <set>

#include "engine/graph/without_nodes.hpp"
#include "engine/run/streams.hpp"
#include "engine/simulate/simulate.hpp"
#include "graphs/schedule/simulation.hpp"
#include "graphs/step/pipeline.hpp"

namespace stepgraph {
namespace {

// The step's schedule without the actions that lowering added. The plan's schedule can be a file that no longer exists.
PipelineSchedule without_transfers(PipelineSchedule schedule) {
  for (std::vector<Action>& row : schedule.rows)
    std::erase_if(row, [](const Action& action) { return !is_compute(action.kind); });
  return schedule;
}

// A window in which rank s mod n takes `factor` times as long in step s. Each step of a rank begins with a take.
Graph slowed_in_turns(const Graph& graph, double factor) {
  Graph made = without_nodes(graph);
  std::vector<int> takes(static_cast<std::size_t>(graph.num_ranks()), 0);
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    NodeSpec spec  = graph.spec(Node{i});
    const int rank = index(graph.rank(Node{i}));
    int& passed    = takes[static_cast<std::size_t>(rank)];
    passed += spec.labels.phase == "take";
    if (passed > 0 && (passed - 1) % graph.num_ranks() == rank) {
      spec.cost.flops *= factor;
      spec.cost.bytes_moved *= factor;
    }
    made.add(spec, graph.body(Node{i}));
  }
  return made;
}

struct Simulating {
  bool on_streams      = false;  // as on devices
  bool chooses         = false;  // what is left to choose is chosen on the machine
  double slow_in_turns = 1;
};

StepPrediction predict(const Model& model, const Plan& plan, const BatchSpec& batch, const Machine& machine,
                       StepOptions options, const Simulating& how = {}) {
  const Plan split = with_split(model, plan, batch, {.machine = options.machine});  // the stages that a run has
  if (options.machine == nullptr) options.machine = &machine;
  if (how.chooses && options.simulator == nullptr) options.simulator = &machine;
  StepPrediction out{.step         = training_step(model, split, batch, options),
                     .plan         = {},
                     .timeline     = {},
                     .tokens_per_s = 0,
                     .unmeasured   = {}};
  if (how.slow_in_turns != 1 && !out.step.window.empty())
    out.step.graph = slowed_in_turns(out.step.graph, how.slow_in_turns);
  out.plan = plan_memory(out.step.graph,
                         {.reuse = plan.reuse, .issue_order = options.issue_order, .workspaces = options.workspaces});
  if (how.on_streams) {
    const Edges edges = stream_edges(out.step.graph, out.plan);
    out.timeline      = simulate({out.step.graph, edges}, machine);
  } else {
    out.timeline = simulate({out.step.graph, out.plan}, machine);
  }
  if (out.makespan_s() > 0)
    out.tokens_per_s = static_cast<double>(std::int64_t{batch.global} * batch.seq) / out.step_s();
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
  const DType param     = plan.precision.param;
  const bool has_device = !calibration.device.empty();
  StepPrediction out =
      predict(model, plan, batch, calibrated_machine(calibration, Layout(plan.layout).num_ranks(), param), options,
              {.on_streams = has_device, .chooses = has_device && options.offload_rates == offload_rates(calibration)});
  const Calibration::Ops measured = ops_of(calibration, param);
  std::set<std::string> unmeasured;
  for (std::uint32_t i = 0; i < out.step.graph.num_nodes(); ++i) {
    const std::string op = op_name(calibration, out.step.graph, Node{i});
    if (!op.empty() && !measured.contains(op)) unmeasured.insert(op);
  }
  // A message is measured as `send`.
  if (measured.contains("send")) unmeasured.erase("recv");
  out.unmeasured.assign(unmeasured.begin(), unmeasured.end());
  return out;
}

StepPrediction predict_step(const Model& model, const Plan& given, const BatchSpec& batch, const Cluster& cluster,
                            const StepOptions& options) {
  Plan plan                    = given;
  plan.layout.devices_per_node = cluster.devices_per_node;
  Machine machine              = cluster_machine(cluster, Layout(plan.layout).num_ranks(), plan.precision.param);
  // A single step is the same for every slow rank.
  if (cluster.slow_in_turns != 1 && plan.update.mode != UpdateWhen::asynchronous)
    machine.slow(Rank{0}, cluster.slow_in_turns * machine.slowness(Rank{0}));
  StepOptions with = options;
  if (!with.offload_rates && plan.offload.moves_something()) with.offload_rates = offload_rates(cluster);
  StepPrediction out = predict(model, plan, batch, machine, with, {.slow_in_turns = cluster.slow_in_turns});
  check_offload_rates(cluster, out.step);
  return out;
}

std::vector<Costs> stage_costs(const StepGraph& step, const Timeline& timeline) {
  std::vector<Costs> costs(static_cast<std::size_t>(step.schedule.num_stages()), Costs{.F = 0, .I = 0, .W = 0});
  const int steps = std::max(1, static_cast<int>(step.window.size()));
  const int times = steps * step.num_microbatches * step.layout.degree({Axis::dp, Axis::tp});
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
double measured_bubble(const StepGraph& step, const Timeline& timeline) {
  struct Span {
    double begin = unlimited, end = 0, work = 0;
  };
  std::map<Rank, Span> ranks;
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
    const Labels labels = step.graph.labels(Node{i});
    if (labels.stage < 0 || labels.microbatch < 0 || step.graph.has_part(Node{i})) continue;
    const NodeTime& time = timeline.nodes[i];
    Span& span           = ranks[step.graph.rank(Node{i})];
    span.begin           = std::min(span.begin, time.begin_s);
    span.end             = std::max(span.end, time.end_s);
    span.work += time.end_s - time.begin_s;
  }
  double longest = 0, work = 0;
  for (const auto& [rank, span] : ranks) {
    longest = std::max(longest, span.end - span.begin);
    work    = std::max(work, span.work);
  }
  return longest > 0 ? std::max(0.0, 1 - work / longest) : 0;
}

double pipeline_efficiency(const StepGraph& step, const std::vector<Costs>& stage_costs) {
  return simulate(without_transfers(step.schedule), {.costs = stage_costs}).efficiency;
}
double pipeline_bubble(const StepGraph& step, const Timeline& timeline) {
  return pipeline_bubble(step, stage_costs(step, timeline));
}

}  // namespace stepgraph
