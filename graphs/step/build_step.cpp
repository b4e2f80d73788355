#include "graphs/step/build_step.hpp"

#include "engine/base/error.hpp"
#include "graphs/step/builder.hpp"
#include "graphs/step/recompute.hpp"
#include "graphs/step/resolve.hpp"

namespace stepgraph {
namespace {

// Checked before sums of sizes can overflow.
void check_size(const Graph& graph) {
  std::vector<double> bytes(graph.ranks().size());  // by place
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& buffer = graph.spec(Buffer{i});
    double& sum              = bytes[*graph.ranks().place(buffer.rank)];
    sum += static_cast<double>(buffer.size_bytes);
    if (sum > 0x1p60) {
      throw Error(ErrorKind::config, str("step: rank ", buffer.rank, " would have buffers of more than ", sum,
                                         " bytes (a smaller model or batch)"));
    }
  }
}

// Counts collectives before they are expanded.
void count_collectives(StepGraph& step) {
  const Graph& graph = step.graph;
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    if (!graph.has_part(Node{i})) continue;
    StepRank& rank         = step.ranks.at(graph.rank(Node{i}));
    const PartOp op        = graph.part(Node{i}).op;
    const bool on_gather   = graph.lane(Node{i}) == Lane{graph.rank(Node{i}), LaneKind::gather};
    const bool of_gradient = graph.labels(Node{i}).phase == "reduce";
    rank.num_all_gathers += op == PartOp::all_gather && on_gather;
    rank.num_reduce_scatters += op == PartOp::reduce_scatter && of_gradient;
    rank.num_all_reduces += op == PartOp::all_reduce && of_gradient;
  }
}

StepGraph build(StepSetup setup, const auto& build_rank) {
  const RankSet ranks = setup.step.graph.ranks();
  for (const Rank rank : ranks) {
    StepBuilder builder(setup, rank);
    build_rank(builder);
  }
  check_size(setup.step.graph);
  const Plan& plan = setup.plan;
  setup.step.graph = recompute(setup.step.graph, plan.recompute);
  setup.step.roles.resize(setup.step.graph.num_buffers(), MemoryRole::activations);  // of tapes, and recomputed
  setup.step.graph = with_slots(setup.step.graph, setup.slots, plan.shard);
  setup.step.roles.resize(setup.step.graph.num_buffers(), MemoryRole::slots);
  count_collectives(setup.step);
  if (plan.algorithm == Algorithm::direct) return std::move(setup.step);
  const Machine usual = two_level_machine({.ranks          = setup.step.layout.num_ranks(),
                                           .ranks_per_node = plan.layout.devices_per_node,
                                           .inside         = {.latency_s = 2e-6, .bytes_per_s = 100e9},
                                           .between        = {.latency_s = 5e-6, .bytes_per_s = 25e9}});
  setup.step.graph    = expand_collectives(setup.step.graph,
                                           {.algorithm      = plan.algorithm,
                                            .ranks_per_node = plan.layout.devices_per_node,
                                            .machine = setup.options.machine != nullptr ? setup.options.machine : &usual,
                                            .most_nodes = max_step_nodes});
  setup.step.roles.resize(setup.step.graph.num_buffers(), MemoryRole::other);
  return std::move(setup.step);
}

}  // namespace

StepGraph build_training_step(const Model& model, const Plan& plan, const BatchSpec& batch,
                              const StepOptions& options) {
  return build(StepSetup(model, resolve(plan, model, batch, true), batch, true, options),
               [](StepBuilder& builder) { builder.training(); });
}

StepGraph build_forward_step(const Model& model, const Plan& plan, const BatchSpec& batch, ForwardResult result,
                             const StepOptions& options) {
  return build(StepSetup(model, resolve(plan, model, batch, false), batch, false, options),
               [result](StepBuilder& builder) { builder.forward_only(result); });
}

}  // namespace stepgraph
