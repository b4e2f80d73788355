#include "graphs/step/asynchronous/window_builder.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/builder/resolve.hpp"
#include "graphs/step/builder/setup.hpp"

namespace stepgraph {
namespace {

constexpr std::string_view scale_op = "update_loss_scale";

// The plan of one data-parallel rank that works alone.
Plan plan_alone(Plan plan) {
  plan.layout.dp = 1;
  plan.update    = {};
  return plan;
}

}  // namespace

WindowBuilder::WindowBuilder(const Model& model, const Plan& plan, const BatchSpec& batch, const StepOptions& options)
    : plan_(resolve(plan, model, batch, true)),
      options_(options),
      dp_(plan.layout.dp),
      bound_(plan.update.max_staleness),
      alone_(build_training_step(model, plan_alone(plan), share_of(batch), options_of(0))),
      made_{.graph            = Graph(dp_, options.only.value_or(RankSet::all(dp_))),
            .layout           = Layout(plan_.layout),
            .model            = alone_.model,
            .batch            = batch,
            .type             = alone_.type,
            .precision        = alone_.precision,
            .optimizer        = alone_.optimizer,
            .num_microbatches = alone_.num_microbatches,
            .shard_size       = dp_,
            .update           = plan_.update,
            .schedule         = alone_.schedule,
            .layers           = alone_.layers,
            .unused           = alone_.unused} {
  const double nodes = static_cast<double>(alone_.graph.num_nodes() + static_cast<std::uint32_t>(dp_)) *
                       static_cast<double>(made_.graph.ranks().size()) * options.window;
  if (nodes > max_step_nodes)
    throw Error(ErrorKind::config, str("step: about ", static_cast<std::int64_t>(nodes), " nodes: ",
                                       alone_.graph.num_nodes(), " of one step x ", dp_, " ranks x ", options.window,
                                       " steps of a window (at most ", max_step_nodes, " nodes; a shorter window)"));
  made_.ranks = StepRanks(made_.layout, made_.graph.ranks());
  made_.window.assign(static_cast<std::size_t>(options.window), made_.ranks);
  find_weights();
  find_places();
  choose_owners();
}

StepGraph WindowBuilder::build() {
  const auto share = share_of(made_.batch);
  for (const Rank rank : made_.graph.ranks()) {
    RankState& state = ranks_.emplace_back();
    state.rank       = rank;
    // Ranks differ in the numbers of their sequences, which dropout depends on.
    state.step = rank == Rank{0} ? alone_.graph
                                 : build_training_step(made_.model, plan_alone(plan_), share,
                                                       options_of(index(rank) * std::int64_t{share.global}))
                                       .graph;
    declare(state);
  }
  for (int receiver = 0; receiver < dp_ && dp_ > 1; ++receiver)
    gates_.push_back(made_.graph.group({.name = str("gate of rank ", receiver), .ranks = all_ranks()}));
  if (dp_ > 1) together_ = made_.graph.group({.name = "window", .ranks = all_ranks()});
  for (RankState& state : ranks_) open(state);
  meet("begin");
  for (int step = 0; step < options_.window; ++step) {
    for (int receiver = 0; receiver < dp_ && step > bound_ && dp_ > 1; ++receiver) add_gate(step, receiver);
    for (RankState& state : ranks_) add_step(state, step);
  }
  for (RankState& state : ranks_) state.ready = state.done.back();
  meet("end");
  for (RankState& state : ranks_) finish(state);
  meet("close");
  for (RankState& state : ranks_) close(state);
  made_.roles.resize(made_.graph.num_buffers(), MemoryRole::activations);
  return std::move(made_);
}

Buffer WindowBuilder::make(BufferSpec spec, MemoryRole role) {
  const Buffer buffer = spec.token ? made_.graph.token(spec.rank, spec.name) : made_.graph.buffer(std::move(spec));
  made_.roles.resize(buffer.id, MemoryRole::activations);
  made_.roles.push_back(role);
  return buffer;
}

Buffer WindowBuilder::token(const RankState& state, std::string name) {
  return make({.name = std::move(name), .rank = state.rank, .token = true}, MemoryRole::other);
}

// The weights that are updated, and how: read off the updates of the step of one rank.
void WindowBuilder::find_weights() {
  std::map<std::uint32_t, std::size_t> by_state;  // the buffer of the first state: into shared_
  for (std::size_t i = 0; i < alone().weights.size(); ++i) {
    const StepWeight& weight = alone().weights[i];
    if (weight.first.empty()) continue;  // tied to another
    by_state[weight.first.buffer.id] = shared_.size();
    shared_.push_back(i);
    weights_.push_back({.elements = weight.value.size(),
                        .type     = alone_.graph.spec(weight.value.buffer).type,
                        .wide     = alone_.graph.spec(weight.first.buffer).type,
                        .gradient = alone_.graph.spec(weight.gradient.buffer).type});
  }
  const OptimizerPlan& optimizer = plan_.optimizer;
  for (std::uint32_t i = 0; i < alone_.graph.num_nodes(); ++i) {
    if (alone_.graph.labels(Node{i}).phase != update_phase) continue;
    const NodeSpec node     = alone_.graph.spec(Node{i});
    const Access state      = node.accumulates.view()[1];
    const std::size_t place = by_state.at(state.buffer.id);
    const StepWeight& of    = alone().weights[shared_[place]];
    const auto size         = static_cast<std::int64_t>(size_bytes(weights_[place].wide));
    const auto whole        = [&](const Access& access) {
      return access.region.length == Access::whole ? Region{.length = alone_.graph.spec(access.buffer).size_bytes}
                                                          : access.region;
    };
    const Region region = whole(state);
    const int group     = static_cast<int>(whole(node.reads.view()[2]).offset / 8);
    double decay        = alone_.spec(of).shape.size() >= 2 ? optimizer.weight_decay : 0;
    if (group > 0) decay = optimizer.groups[static_cast<std::size_t>(group) - 1].weight_decay.value_or(decay);
    weights_[place].ranges.push_back({region.begin() / size, region.end() / size, group, decay});
  }
}

// What becomes of each buffer of the step of one rank.
void WindowBuilder::find_places() {
  places_.resize(alone_.graph.num_buffers());
  for (std::uint32_t i = 0; i < places_.size(); ++i) {
    const bool lasts = alone_.graph.spec(Buffer{i}).lifetime == Lifetime::persistent;
    places_[i]       = lasts ? Place::of_rank : Place::of_step;
  }
  const auto set = [&](Buffer buffer, Place place) {
    if (buffer != Buffer{}) places_[buffer.id] = place;
  };
  const StepRank& rank = alone();
  for (const auto* list : {&rank.tokens, &rank.targets})
    for (const Buffer buffer : *list) set(buffer, Place::of_step);
  for (const Buffer buffer :
       {rank.loss, rank.grad_norm, rank.step_number, rank.rate, rank.num_ignored, rank.loss_scale, rank.skipped})
    set(buffer, Place::of_step);
  for (const Buffer buffer : {rank.num_updates, rank.good_steps}) set(buffer, Place::nowhere);
  for (const StepWeight& weight : rank.weights)
    for (const StoredRange& state : {weight.first, weight.second, weight.master}) set(state.buffer, Place::nowhere);
}

// The largest weight first, to the rank with the fewest elements.
void WindowBuilder::choose_owners() {
  std::vector<std::size_t> order(weights_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return weights_[a].elements > weights_[b].elements; });
  std::vector<std::int64_t> elements(static_cast<std::size_t>(dp_), 0);
  owner_.resize(weights_.size());
  for (const std::size_t i : order) {
    const auto least = std::min_element(elements.begin(), elements.end());
    *least += weights_[i].elements;
    owner_[i] = static_cast<int>(least - elements.begin());
  }
  store_ =
      std::make_shared<VersionStore>(VersionStore::Spec{.num_ranks     = dp_,
                                                        .optimizer     = plan_.optimizer,
                                                        .dynamic_scale = plan_.precision.scaling() == Scaling::dynamic,
                                                        .growth_steps  = plan_.precision.loss_scale.growth_steps,
                                                        .weights       = weights_});
}

Buffer WindowBuilder::like(const RankState& state, Buffer buffer, std::string name) {
  BufferSpec spec = alone_.graph.spec(buffer);
  spec.rank       = state.rank;
  spec.name       = std::move(name);
  return make(std::move(spec), alone_.role(buffer));
}

// Buffers that all steps of the window use.
void WindowBuilder::declare(RankState& state) {
  StepRank& rank = made_.ranks.at(state.rank);
  state.kept.resize(places_.size());
  for (std::uint32_t i = 0; i < places_.size(); ++i) {
    if (places_[i] == Place::of_rank) state.kept[i] = like(state, Buffer{i});
  }
  rank.num_updates = like(state, alone().num_updates);
  if (scales()) {
    rank.loss_scale = like(state, alone().loss_scale);
    rank.good_steps = like(state, alone().good_steps);
  }
  for (const StepWeight& from : alone().weights) {
    StepWeight weight      = from;
    weight.value.buffer    = state.kept[from.value.buffer.id];
    weight.gradient.buffer = {};
    weight.first = weight.second = weight.master = {.sharded = dp_ > 1};
    rank.weights.push_back(weight);
  }
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    if (owner_[i] == index(state.rank)) declare_owned(state, i);
  }
}

void WindowBuilder::declare_owned(RankState& state, std::size_t i) {
  const StepWeight& from = alone().weights[shared_[i]];
  StepWeight& weight     = made_.ranks.at(state.rank).weights[shared_[i]];
  Owned owned{.weight = i};
  const auto keep = [&](const StoredRange& part, Buffer& buffer) {
    if (part.empty()) return part;
    buffer           = like(state, part.buffer);
    StoredRange made = part;
    made.buffer      = buffer;
    made.sharded     = dp_ > 1;
    return made;
  };
  weight.first  = keep(from.first, owned.first);
  weight.second = keep(from.second, owned.second);
  weight.master = keep(from.master, owned.master);
  for (int slot = 0; slot < VersionStore::num_slots(dp_); ++slot) {
    owned.versions.push_back(make({.name       = str("version ", slot, " of ", alone_.spec(from).name),
                                   .rank       = state.rank,
                                   .size_bytes = weights_[i].value_bytes(),
                                   .type       = weights_[i].type},
                                  MemoryRole::parameters));
  }
  state.owned.push_back(std::move(owned));
}

void WindowBuilder::add_step(RankState& state, int step) {
  StepRank& rank                 = made_.window[static_cast<std::size_t>(step)].at(state.rank);
  const std::vector<Buffer> here = declare_step(state, step, rank);
  add_take(state, step, rank);
  for (std::uint32_t i = 0; i < state.step.num_nodes(); ++i) add_node(state, step, Node{i}, here);
  add_give(state, step, rank, here);
}

// The buffers of one step of one rank, by buffer of the step of one rank.
std::vector<Buffer> WindowBuilder::declare_step(RankState& state, int step, StepRank& rank) {
  std::vector<Buffer> here = state.kept;
  for (std::uint32_t i = 0; i < places_.size(); ++i) {
    const BufferSpec& spec = alone_.graph.spec(Buffer{i});
    if (places_[i] != Place::of_step) continue;
    here[i] = spec.token ? token(state, named(spec.name, step)) : like(state, Buffer{i}, named(spec.name, step));
  }
  const auto moved = [&](Buffer buffer) { return buffer == Buffer{} ? buffer : here[buffer.id]; };
  for (const Buffer buffer : alone().tokens) rank.tokens.push_back(moved(buffer));
  for (const Buffer buffer : alone().targets) rank.targets.push_back(moved(buffer));
  rank.loss        = moved(alone().loss);
  rank.grad_norm   = moved(alone().grad_norm);
  rank.step_number = moved(alone().step_number);
  rank.rate        = moved(alone().rate);
  rank.num_ignored = moved(alone().num_ignored);
  rank.loss_scale  = moved(alone().loss_scale);
  rank.skipped     = moved(alone().skipped);
  const auto count = [&](std::string_view name, std::int64_t elements) {
    return make({.name       = named(name, step),
                 .rank       = state.rank,
                 .size_bytes = 8 * elements,
                 .type       = DType::i64,
                 .lifetime   = Lifetime::persistent},
                MemoryRole::other);
  };
  rank.num_ignored_of_all = count("ignored targets of all ranks", 1);
  rank.taken              = count("version taken", 2);
  rank.given              = count("version given", 1);
  if (step == 0) keep_first(state, rank, here);
  return here;
}

// StepGraph::ranks has the first step's buffers.
void WindowBuilder::keep_first(const RankState& state, const StepRank& from, const std::vector<Buffer>& here) {
  StepRank& rank         = made_.ranks.at(state.rank);
  const StepRank lasting = rank;
  rank                   = from;
  rank.coord             = lasting.coord;
  rank.num_updates       = lasting.num_updates;
  rank.loss_scale        = lasting.loss_scale;
  rank.good_steps        = lasting.good_steps;
  rank.weights           = lasting.weights;
  for (std::size_t i = 0; i < rank.weights.size(); ++i) {
    const Buffer gradient = alone().weights[i].gradient.buffer;
    if (gradient != Buffer{}) rank.weights[i].gradient.buffer = here[gradient.id];
  }
}

// A node of the step of one rank, but for its updates.
void WindowBuilder::add_node(const RankState& state, int step, Node node, const std::vector<Buffer>& here) {
  if (state.step.labels(node).phase == update_phase || state.step.op(node) == scale_op) return;
  NodeSpec spec = state.step.spec(node);
  if (spec.part) throw Error(ErrorKind::graph, str("asynchronous: ", state.step.describe(node), " is a communication"));
  spec.reads = spec.writes = spec.accumulates = {};
  for (std::size_t i = 0; i < state.step.num_accesses(node); ++i) {
    const Graph::AccessView view = state.step.access(node, i);
    const Buffer buffer          = here[view.buffer.id];
    if (buffer == Buffer{})
      throw Error(ErrorKind::graph,
                  str("asynchronous: ", state.step.describe(node), " uses ", state.step.describe(view.buffer),
                      ", which only updates use (the phase '", update_phase, "')"));
    AccessList& list = view.mode == AccessMode::read    ? spec.reads
                       : view.mode == AccessMode::write ? spec.writes
                                                        : spec.accumulates;
    list.push_back({buffer, view.region});
  }
  spec.name = named(spec.name, step);
  spec.rank = state.rank;
  if (spec.lane) spec.lane->rank = state.rank;
  made_.graph.add(spec, state.step.body(node));
}

}  // namespace stepgraph
