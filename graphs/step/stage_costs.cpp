#include <algorithm>
#include <limits>
#include <numeric>

#include "engine/base/error.hpp"
#include "engine/base/types.hpp"
#include "graphs/layout/divisibility.hpp"
#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/builder/resolve.hpp"
#include "graphs/step/pipeline.hpp"
#include "graphs/step/searched_schedule.hpp"

namespace stepgraph {
namespace {

// Whether tensor-parallel ranks divide the tokens of a microbatch. A prompt can have any number of tokens.
bool divides_sequence(const Plan& plan, const BatchSpec& batch) {
  const int tp = plan.layout.tp;
  return plan.layout.sequence_parallel && tp > 1 && std::int64_t{batch.micro} * batch.seq % tp == 0;
}

// The step of one microbatch with a stage for each layer, and I and W apart. Of each tensor-parallel group one rank.
StepGraph step_of_layers(const Model& model, const Plan& plan, const BatchSpec& batch) {
  Plan alone;
  alone.layout    = {.tp = plan.layout.tp, .pp = model.layers, .sequence_parallel = divides_sequence(plan, batch)};
  alone.pipeline  = {.schedule = "zb-h1"};
  alone.precision = plan.precision;
  alone.recompute = plan.recompute == Recompute::automatic ? Recompute::none : plan.recompute;  // not chosen yet
  const Layout layout(alone.layout);
  std::vector<Rank> ranks;
  for (int stage = 0; stage < model.layers; ++stage) ranks.push_back(layout.rank({.pp = stage}));
  return build_training_step(model, alone, {.global = batch.micro, .micro = batch.micro, .seq = batch.seq},
                             {.only = RankSet(std::move(ranks))});
}

// The time of a node while other workers have nodes, too: pipelines keep all of them busy.
double time_of(const Graph& graph, Node node, const Machine& machine) {
  const NodeKind kind = graph.has_part(node) ? NodeKind::communicate : graph.kind(node);
  const Cost& cost    = graph.cost(node);
  const Rate& rate    = machine.rate_of(kind, graph.op(node));
  if (const RateTable* table = machine.table_of(graph.op(node), kind))
    return rate.overhead_s + table->at(cost.flops, cost.bytes_moved).busy_s;
  return rate.overhead_s + std::max(cost.flops / rate.flops_per_s, cost.bytes_moved / rate.bytes_per_s);
}

// The time of a message between neighbouring ranks of a machine with a network: the slowest link of the route.
double message_time(const Machine& machine, Rank from, Rank to, double bytes) {
  const auto& tree = machine.network();
  double latency = 2 * machine.message_overhead_s(), bandwidth = unlimited;
  const auto pass = [&](const Link& link) {
    latency += link.latency_s;
    bandwidth = std::min(bandwidth, link.bytes_per_s);
  };
  auto up = static_cast<std::size_t>(index(from)), down = static_cast<std::size_t>(index(to));
  while (up != down) {
    std::size_t& lower = tree[up].depth >= tree[down].depth ? up : down;
    pass(&lower == &up ? tree[lower].up : tree[lower].down);
    lower = static_cast<std::size_t>(tree[lower].above);
  }
  return latency + bytes / bandwidth;
}

// Work of the search for a schedule: a second or two.
constexpr double search_budget_s = 4;

double sum_of(const Costs& costs) { return costs.F + costs.I + costs.W; }

}  // namespace

std::vector<Costs> layer_costs(const Model& model, const Plan& plan, const BatchSpec& batch, const Machine* machine) {
  const StepGraph step = step_of_layers(model, plan, batch);
  const Graph& graph   = step.graph;
  std::vector<Costs> layers(static_cast<std::size_t>(model.layers), Costs{0, 0, 0, 0});
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    const Node node{i};
    const Labels labels = graph.labels(node);
    if (labels.stage < 0 || labels.microbatch < 0) continue;
    Costs& layer = layers[static_cast<std::size_t>(labels.stage)];
    if (graph.has_part(node)) {
      if (machine != nullptr && !machine->has_network() && graph.part(node).op == PartOp::send)
        layer.COMM = std::max(layer.COMM, time_of(graph, node, *machine));
      continue;
    }
    const double cost = machine != nullptr ? time_of(graph, node, *machine) : graph.cost(node).flops;
    (labels.phase == "forward" ? layer.F : labels.phase == "weight" ? layer.W : layer.I) += cost;
  }
  if (machine == nullptr || !machine->has_network()) return layers;
  const Layout layout(plan.layout);
  const double bytes = static_cast<double>(std::int64_t{batch.micro} * batch.seq * model.width *
                                           static_cast<std::int64_t>(size_bytes(plan.precision.param))) /
                       (divides_sequence(plan, batch) ? plan.layout.tp : 1);
  double slowest = 0;
  for (int pp = 0; pp + 1 < plan.layout.pp; ++pp)
    slowest = std::max(slowest, message_time(*machine, layout.rank({.pp = pp}), layout.rank({.pp = pp + 1}), bytes));
  for (Costs& layer : layers) layer.COMM = slowest;
  return layers;
}

std::vector<Costs> stage_costs(const Model& model, const Plan& plan, const BatchSpec& batch, const Machine* machine) {
  const std::vector<Costs> layers = layer_costs(model, plan, batch, machine);
  const int num_stages            = static_cast<int>(placement_of_stages(plan.pipeline, plan.layout.pp).size());
  const std::vector<int> split    = plan.pipeline.balanced        ? balanced_split(layers, num_stages)
                                    : plan.pipeline.split.empty() ? split_layers(model.layers, num_stages)
                                                                  : plan.pipeline.split;
  std::vector<Costs> stages;
  std::size_t next = 0;
  for (const int count : split_layers(model.layers, num_stages, split)) {
    Costs& stage = stages.emplace_back(Costs{0, 0, 0, 0});
    for (int i = 0; i < count; ++i, ++next) {
      const Costs& layer = layers[next];
      stage              = {stage.F + layer.F, stage.I + layer.I, stage.W + layer.W, std::max(stage.COMM, layer.COMM)};
    }
  }
  return stages;
}

std::vector<int> balanced_split(const std::vector<Costs>& layers, int num_stages) {
  const int n = static_cast<int>(layers.size());
  if (num_stages < 1 || n < num_stages) {
    throw Error(ErrorKind::config, str("pipeline.split: balanced needs a layer for each stage, but there are ", n,
                                       " layers and ", num_stages, " stages"));
  }
  std::vector<double> before{0};  // [layer]: the costs of all layers before it
  for (const Costs& layer : layers) before.push_back(before.back() + sum_of(layer));
  const auto cost = [&](int begin, int end) {
    return before[static_cast<std::size_t>(end)] - before[static_cast<std::size_t>(begin)];
  };
  const auto at         = [&](int stage, int end) { return static_cast<std::size_t>(stage * (n + 1) + end); };
  constexpr double none = std::numeric_limits<double>::infinity();
  // [stages][layers that they have]: first the least maximum, then the least sum of squares with that maximum.
  std::vector<double> best(at(num_stages, n) + 1, none);
  std::vector<int> begin(best.size());
  const auto fill = [&](const auto& join) {
    std::fill(best.begin(), best.end(), none);
    best[at(0, 0)] = 0;
    for (int stage = 1; stage <= num_stages; ++stage) {
      for (int end = stage; end <= n; ++end) {
        for (int from = stage - 1; from < end; ++from) {
          const double with = join(best[at(stage - 1, from)], cost(from, end));
          if (with >= best[at(stage, end)]) continue;
          best[at(stage, end)]  = with;
          begin[at(stage, end)] = from;
        }
      }
    }
  };
  fill([](double others, double own) { return std::max(others, own); });
  const double most = best[at(num_stages, n)] * (1 + 1e-12);  // sums are rounded
  fill([&](double others, double own) { return own > most ? none : others + own * own; });
  std::vector<int> split(static_cast<std::size_t>(num_stages));
  for (int stage = num_stages, end = n; stage > 0; --stage) {
    const int from                             = begin[at(stage, end)];
    split[static_cast<std::size_t>(stage - 1)] = end - from;
    end                                        = from;
  }
  return split;
}

Plan with_split(const Model& model, const Plan& plan, const BatchSpec& batch, const SplitOptions& options) {
  const bool searches = options.search && plan.pipeline.schedule == "auto" && !plan.pipeline.found;
  if (!plan.pipeline.balanced && !searches) return plan;
  if (plan.pipeline.balanced && !plan.pipeline.split.empty())
    throw Error(ErrorKind::config, "pipeline.split: balanced and a list (one of them)");
  static_cast<void>(resolve(plan, model, batch, false));  // throws where they do not fit together
  Plan with = plan;
  if (plan.pipeline.balanced) {
    const int num_stages   = static_cast<int>(placement_of_stages(plan.pipeline, plan.layout.pp).size());
    with.pipeline.split    = balanced_split(layer_costs(model, plan, batch, options.machine), num_stages);
    with.pipeline.balanced = false;
  }
  if (searches) {
    set_searched_schedule(model, with, batch,
                          {.ranks        = plan.layout.pp,
                           .microbatches = microbatches_of(plan, batch),
                           .chunks       = num_chunks(plan.pipeline) == 1 ? SearchChunks::one : SearchChunks::two,
                           .costs        = stage_costs(model, with, batch, options.machine),
                           .limit        = activation_limit(model, with, batch),
                           .budget_s     = search_budget_s,
                           .by_clock     = false,
                           .on_progress  = options.on_search});
  }
  return with;
}

}  // namespace stepgraph
