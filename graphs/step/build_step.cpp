#include "graphs/step/build_step.hpp"

#include <algorithm>

#include "engine/base/error.hpp"
#include "graphs/step/builder.hpp"
#include "graphs/step/offload/choose.hpp"
#include "graphs/step/offload/fill_device.hpp"
#include "graphs/step/offload/layers.hpp"
#include "graphs/step/offload/strategy.hpp"
#include "graphs/step/pipeline.hpp"
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
void offload(StepGraph& step, const Plan& plan, const StepOptions& options) {
  step.offload.amounts    = usual_amounts(plan, options);
  step.offload.amounts_of = options.offload_of;
  const HomePlan homes    = choose_homes(step, plan, step.offload.amounts, options);
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

StepGraph build(StepSetup setup, const auto& build_rank) {
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
  offload(setup.step, plan, setup.options);
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

namespace {

bool moves_layer(const std::vector<OffloadedUnit>& units, Rank rank, int layer) {
  const std::string name = str("layer", layer, " ");
  return std::any_of(units.begin(), units.end(), [&](const OffloadedUnit& unit) {
    return unit.of == OffloadClass::activations && unit.rank == rank && unit.unit.starts_with(name);
  });
}

}  // namespace

std::optional<ActivationCounts> StepGraph::activations(std::optional<Rank> rank) const {
  std::map<int, ActivationMode> modes;  // by layer
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    const Labels labels = graph.labels(Node{i});
    if (labels.layer < 0 || labels.phase != "forward" || (rank && graph.rank(Node{i}) != *rank)) continue;
    const auto own     = offload.amounts_of.find(graph.rank(Node{i}));
    const auto& chosen = (own == offload.amounts_of.end() ? offload.amounts : own->second).layers;
    if (chosen.empty()) continue;
    ActivationMode& mode = modes[labels.layer];
    mode                 = chosen.at(static_cast<std::size_t>(labels.layer));
    if (mode == ActivationMode::offload && !moves_layer(offload.units, graph.rank(Node{i}), labels.layer))
      mode = ActivationMode::keep;
  }
  if (modes.empty()) return std::nullopt;
  ActivationCounts counts;
  for (const auto& [layer, mode] : modes) {
    ++(mode == ActivationMode::keep        ? counts.kept
       : mode == ActivationMode::recompute ? counts.recomputed
                                           : counts.offloaded);
  }
  return counts;
}

const HomeFormat* StepGraph::home(Buffer buffer) const {
  const auto found = std::find_if(homes.begin(), homes.end(), [&](const HomeFormat& of) { return of.home == buffer; });
  return found == homes.end() ? nullptr : &*found;
}

DType StepGraph::element_type(Buffer buffer) const {
  const HomeFormat* const format = home(buffer);
  return format == nullptr ? graph.spec(buffer).type : format->type;
}

namespace {

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

// Chooses the open amounts of the plan by building steps of single ranks. `build` builds a step with all amounts given.
std::map<Rank, OffloadAmounts> chosen_offload(const Plan& plan, const StepOptions& options, bool trains,
                                              const auto& build) {
  if (options.offload || !options.offload_of.empty() || !chooses_offload(plan, trains)) return {};
  check_offload(plan.offload);
  const auto of_rank = [&](Rank rank, const OffloadAmounts& amounts) {
    StepOptions alone = options;
    alone.only        = rank;
    alone.offload     = amounts;
    return build(alone);
  };
  StepOptions chosen = options;
  if (trains && plan.recompute == Recompute::automatic) {
    chosen.offload_of = choose_layers(plan, options, of_rank);
  } else if (plan.offload.strategy != OffloadStrategy::manual) {
    chosen.offload_of = choose_amounts(plan, options, of_rank);
  }
  if (trains && fills_device(plan.offload)) chosen.offload_of = keep_residents(plan, chosen, of_rank);
  return chosen.offload_of;
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
    options_.update_first |= plan.offload.overlaps_updates();
  }
  [[nodiscard]] std::map<Rank, OffloadAmounts> choice() const {
    return chosen_offload(plan_, options_, true, [&](const StepOptions& of) { return with(of); });
  }
  [[nodiscard]] StepGraph step() const { return with(with_choice(options_, choice())); }

 private:
  [[nodiscard]] StepGraph with(const StepOptions& options) const {
    return build(StepSetup(model_, resolve(plan_, model_, batch_, true), batch_, true, options),
                 [](StepBuilder& builder) { builder.training(); });
  }

  const Model& model_;
  const BatchSpec& batch_;
  Plan plan_;
  StepOptions options_;
};

}  // namespace

bool chooses_offload(const Plan& plan, bool trains) noexcept {
  return plan.offload.strategy != OffloadStrategy::manual ||
         (trains && (plan.recompute == Recompute::automatic || fills_device(plan.offload)));
}

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
                             const StepOptions& options) {
  const Plan split    = with_split(model, plan, batch, {.machine = options.machine, .search = false});
  const auto build_of = [&](const StepOptions& of) {
    return build(StepSetup(model, resolve(split, model, batch, false), batch, false, of),
                 [result](StepBuilder& builder) { builder.forward_only(result); });
  };
  return build_of(with_choice(options, chosen_offload(split, options, false, build_of)));
}

}  // namespace stepgraph
