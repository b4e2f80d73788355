#include "graphs/step/builder/build_step.hpp"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "engine/base/error.hpp"
#include "graphs/step/builder/builder.hpp"
#include "graphs/step/builder/resolve.hpp"
#include "graphs/step/memory/likeness.hpp"
#include "graphs/step/offload/choose/choose.hpp"
#include "graphs/step/offload/choose/open_amounts.hpp"
#include "graphs/step/pipeline.hpp"
#include "graphs/step/recompute.hpp"

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

OffloadAmounts usual_amounts(const Plan& plan, const StepOptions& options) {
  return options.offload.value_or(manual_amounts(plan.offload));
}

// Recomputes layers as the plan says, or on ranks that have OffloadAmounts::layers, as these say.
Graph with_recomputation(const StepGraph& step, const Plan& plan, const StepOptions& options) {
  const OffloadAmounts usual = usual_amounts(plan, options);
  std::map<Rank, const std::vector<ActivationMode>*> layers_of;
  for (const Rank rank : step.graph.ranks()) {
    const auto own      = options.offload_of.find(rank);
    const auto& layers  = (own == options.offload_of.end() ? usual : own->second).layers;
    const auto expected = static_cast<std::size_t>(step.model.layers);
    if (layers.empty()) continue;
    if (layers.size() != expected) {
      throw Error(ErrorKind::config, str("offload: activations of ", layers.size(), " layers for rank ", rank,
                                         " (one entry for each of the ", expected, " layers of the model, or none)"));
    }
    layers_of[rank] = &layers;
  }
  const Recompute otherwise = plan.recompute == Recompute::automatic ? Recompute::none : plan.recompute;
  if (layers_of.empty()) return recompute(step.graph, otherwise);
  return recompute(step.graph, [&](Rank rank, int layer) {
    const auto found = layers_of.find(rank);
    if (found == layers_of.end()) return otherwise;
    const ActivationMode mode = (*found->second)[static_cast<std::size_t>(layer)];
    return mode == ActivationMode::recompute ? Recompute::full : Recompute::none;
  });
}

// Activations that are used again too soon stay on the device: no node uses their homes.
HomePlan used_homes(HomePlan plan, const WithHomes& made) {
  std::vector<bool> used(made.graph.num_buffers(), false);
  for (std::uint32_t node = 0; node < made.graph.num_nodes(); ++node) {
    for (std::size_t i = 0; i < made.graph.num_accesses(Node{node}); ++i)
      used[made.graph.access(Node{node}, i).buffer.id] = true;
  }
  std::vector<Home> homes;
  for (std::size_t i = 0; i < plan.homes.size(); ++i) {
    if (plan.homes[i].of != OffloadClass::activations || used[made.homes[i].home.id]) homes.push_back(plan.homes[i]);
  }
  plan.homes = std::move(homes);
  return plan;
}

// Gives offloaded buffers their homes.
void offload(StepGraph& step, const Plan& plan, const StepOptions& options, offload::StepUnits* known) {
  step.offload.amounts    = usual_amounts(plan, options);
  step.offload.amounts_of = options.offload_of;
  const HomePlan homes    = choose_homes(step, plan, step.offload.amounts, options, known);
  if (homes.homes.empty()) return;
  step.offload.settings         = homes;
  step.offload.settings.homes   = {};
  step.offload.settings.updates = {};
  const std::uint32_t first_new = step.graph.num_buffers();
  WithHomes made                = with_homes(step.graph, homes);
  step.offload.units            = offloaded_units(step.graph, used_homes(homes, made));
  step.graph                    = std::move(made.graph);
  step.homes                    = std::move(made.homes);
  for (std::uint32_t i = first_new; i < step.graph.num_buffers(); ++i) {
    const BufferSpec& spec = step.graph.spec(Buffer{i});
    step.roles.push_back(spec.token || spec.space != Space::device ? MemoryRole::other : MemoryRole::slots);
  }
  for (const HomeFormat& home : step.homes) {
    if (home.home.id >= first_new) step.roles[home.home.id] = step.role(home.buffer);
  }
}

// All passes before offload. Of the amounts of offload, only the layers count here.
StepSetup prepared(StepSetup setup, const auto& build_rank) {
  const RankSet ranks = setup.step.graph.ranks();
  for (const Rank rank : ranks) {
    StepBuilder builder(setup, rank);
    build_rank(builder);
  }
  check_size(setup.step.graph);
  const Plan& plan = setup.plan;
  setup.step.graph = with_recomputation(setup.step, plan, setup.options);
  setup.step.roles.resize(setup.step.graph.num_buffers(), MemoryRole::activations);  // of tapes, and recomputed
  setup.step.graph = with_slots(setup.step.graph, setup.slots, plan.shard);
  setup.step.roles.resize(setup.step.graph.num_buffers(), MemoryRole::slots);
  count_collectives(setup.step);
  return setup;
}

StepGraph finished(StepSetup setup, offload::StepUnits* known = nullptr) {
  const Plan& plan = setup.plan;
  offload(setup.step, plan, setup.options, known);
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

// Options that do not work with gradients of earlier steps.
void check_delay_options(const UpdatePlan& update, const StepOptions& options) {
  if (!update.delays()) return;
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::config, str("update.mode: stale with max_staleness ", update.max_staleness, " ", why,
                                       " (update.mode synchronous)"));
  };
  if (options.keep_gradients)
    refuse("keeps no gradients that can be read after a step: they are reduced in the next one");
  if (options.update_first) refuse("does not update first, as StepOptions::update_first asks");
}

// Builds steps of single ranks that differ in their offload alone: the passes before it run once.
class SliceBuilder {
 public:
  using Prepare = std::function<StepSetup(const StepOptions& options)>;
  SliceBuilder(const StepOptions& options, Prepare prepare) : options_(options), prepare_(std::move(prepare)) {}

  StepGraph operator()(Rank rank, const OffloadAmounts& amounts) {
    StepOptions alone = options_;
    alone.only        = rank;
    alone.offload     = amounts;
    if (!last_ || last_->rank != rank || last_->layers != amounts.layers) {
      last_.reset();
      last_.emplace(Last{rank, amounts.layers, prepare_(alone), {}});
    }
    StepSetup setup       = last_->setup;
    setup.options.offload = amounts;
    return finished(std::move(setup), &last_->units);
  }

 private:
  struct Last {
    Rank rank;
    std::vector<ActivationMode> layers;
    StepSetup setup;
    offload::StepUnits units;
  };
  const StepOptions& options_;
  Prepare prepare_;
  std::optional<Last> last_;
};

// Chooses the open amounts of the plan by building steps of single ranks. `prepare` runs the passes before offload.
std::map<Rank, OffloadAmounts> chosen_offload(const Plan& plan, const StepOptions& options, bool trains,
                                              SliceBuilder::Prepare prepare, RankKinds kinds) {
  check_offload(plan.offload);
  SliceBuilder builder(options, std::move(prepare));
  return choose_open_amounts(plan, options, trains,
                             {.build = [&](Rank rank, const OffloadAmounts& amounts) { return builder(rank, amounts); },
                              .first_like = [&](Rank rank) { return kinds.first_like(rank); }});
}

// The options give the amounts, or the plan leaves nothing to choose.
bool is_chosen(const Plan& plan, const StepOptions& options, bool trains) {
  return options.offload || !options.offload_of.empty() || !chooses_offload(plan, trains);
}

StepOptions with_choice(const StepOptions& options, std::map<Rank, OffloadAmounts> choice) {
  StepOptions made = options;
  if (!choice.empty()) made.offload_of = std::move(choice);
  return made;
}

// Builds steps with a plan that leaves no stages to choose.
class TrainingBuild {
 public:
  TrainingBuild(const Model& model, const Plan& plan, const BatchSpec& batch, const StepOptions& options)
      : model_(model),
        batch_(batch),
        plan_(with_split(model, plan, batch, {.machine = options.machine})),
        options_(options) {
    check_delay_options(plan.update, options);
    plan_.offload = with_amounts(plan_.offload, options.offload);
    options_.update_first |= plan_.offload.overlaps_updates() && !updates_early(plan_);
  }
  [[nodiscard]] std::map<Rank, OffloadAmounts> choice() const {
    if (is_chosen(plan_, options_, true)) return {};
    return chosen_offload(
        plan_, options_, true, [&](const StepOptions& of) { return prepared_with(of); },
        RankKinds(model_, resolve(plan_, model_, batch_, true), batch_, true));
  }
  [[nodiscard]] StepGraph step() const { return finished(prepared_with(with_choice(options_, choice()))); }

 private:
  [[nodiscard]] StepSetup prepared_with(const StepOptions& options) const {
    return prepared(StepSetup(model_, resolve(plan_, model_, batch_, true), batch_, true, options),
                    [](StepBuilder& builder) { builder.training(); });
  }

  const Model& model_;
  const BatchSpec& batch_;
  Plan plan_;
  StepOptions options_;
};

}  // namespace

std::map<Rank, OffloadAmounts> choose_offload(const Model& model, const Plan& plan, const BatchSpec& batch,
                                              const StepOptions& options) {
  if (plan.update.mode == UpdateWhen::asynchronous) return {};
  return TrainingBuild(model, plan, batch, options).choice();
}

StepGraph build_training_step(const Model& model, const Plan& plan, const BatchSpec& batch,
                              const StepOptions& options) {
  if (plan.update.mode == UpdateWhen::asynchronous) return build_asynchronous_window(model, plan, batch, options);
  return TrainingBuild(model, plan, batch, options).step();
}

StepGraph build_forward_step(const Model& model, const Plan& plan, const BatchSpec& batch, ForwardResult result,
                             const StepOptions& given) {
  const StepOptions options = of_forward(given);
  const Plan split          = with_split(model, plan, batch, {.machine = options.machine, .search = false});
  const auto resolved       = [&] { return resolve(split, model, batch, false); };
  const auto prepare        = [&](const StepOptions& of) {
    return prepared(StepSetup(model, resolved(), batch, false, of),
                           [result](StepBuilder& builder) { builder.forward_only(result); });
  };
  if (is_chosen(split, options, false)) return finished(prepare(options));
  return finished(prepare(with_choice(
      options, chosen_offload(split, options, false, prepare, RankKinds(model, resolved(), batch, false)))));
}

}  // namespace stepgraph
