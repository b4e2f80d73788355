// The nodes of an asynchronous window that are not those of a step: its gates, and its use of the versions of weights.
#include <cmath>
#include <utility>

#include "engine/run/context.hpp"
#include "graphs/step/asynchronous/window_builder.hpp"
#include "ops/updates/apply_update.hpp"

namespace stepgraph {
namespace {

// Bytes of the i-th access as an address.
std::byte* written(const Context& context, std::size_t i) { return context.write<std::byte>(i).data(); }
const std::byte* read_at(const Context& context, std::size_t i) { return context.read<std::byte>(i).data(); }
std::byte* accumulated(const Context& context, std::size_t i) { return context.accumulate<std::byte>(i).data(); }

}  // namespace

Access WindowBuilder::value(const RankState& state, std::size_t i) const {
  const StoredRange& part = alone().weights[shared_[i]].value;
  const auto size         = static_cast<std::int64_t>(size_bytes(weights_[i].type));
  return state.kept[part.buffer.id].range(part.offset * size, part.size() * size);
}

AccessList WindowBuilder::all_values(const RankState& state) const {
  AccessList list;
  for (std::size_t i = 0; i < weights_.size(); ++i) list.push_back(value(state, i));
  return list;
}

AccessList WindowBuilder::states_of(const Owned& owned) {
  AccessList list;
  for (const Buffer buffer : {owned.first, owned.second, owned.master})
    if (buffer != Buffer{}) list.push_back(buffer);
  return list;
}

double WindowBuilder::value_bytes() const {
  double bytes = 0;
  for (const SharedWeight& weight : weights_) bytes += static_cast<double>(weight.value_bytes());
  return bytes;
}

// Lends the versions and states of a rank to the store. Its weights become the first version.
void WindowBuilder::open(RankState& state) {
  const StepRank& rank = made_.ranks.at(state.rank);
  state.ready          = token(state, "open");
  NodeSpec node{.name     = "open versions",
                .lane     = Lane{state.rank, LaneKind::compute},
                .kind     = NodeKind::copy,
                .op       = "open_versions",
                .parallel = true,
                .labels   = {.phase = "open"}};
  std::vector<std::size_t> weights;
  for (const Owned& owned : state.owned) {
    weights.push_back(owned.weight);
    node.reads.push_back(value(state, owned.weight));
    for (const Buffer version : owned.versions) node.writes.push_back(version);
    const AccessList states = states_of(owned);
    for (const Access& each : states.view()) node.accumulates.push_back(each);
    node.cost.bytes_moved += 2 * static_cast<double>(weights_[owned.weight].value_bytes());
  }
  const bool begins = state.rank == Rank{0};
  if (begins) {
    node.reads.push_back(rank.num_updates);
    if (scales()) {
      node.reads.push_back(rank.loss_scale);
      node.reads.push_back(rank.good_steps);
    }
  }
  node.writes.push_back(state.ready);
  made_.graph.add(node, [store = store_, weights = std::move(weights), all = weights_, begins, scales = scales(),
                         adamw = plan_.optimizer.kind == OptimizerKind::adamw, dp = std::int64_t{dp_},
                         slots = static_cast<std::size_t>(VersionStore::num_slots(dp_))](const Context& context) {
    std::size_t next = 0;  // state
    for (std::size_t k = 0; k < weights.size(); ++k) {
      VersionStore::Places places;
      for (std::size_t slot = 0; slot < slots; ++slot) places.versions.push_back(written(context, k * slots + slot));
      places.first = accumulated(context, next++);
      if (adamw) places.second = accumulated(context, next++);
      if (all[weights[k]].has_master()) places.master = accumulated(context, next++);
      copy_shared(context, places.versions.front(), read_at(context, k), all[weights[k]].value_bytes());
      store->open(weights[k], std::move(places));
    }
    if (!begins) return;
    StoreNumbers numbers{.num_updates = context.read<std::int64_t>(weights.size()).front()};
    if (scales) {
      numbers.loss_scale   = context.read<double>(weights.size() + 1).front();
      numbers.good_updates = dp * context.read<std::int64_t>(weights.size() + 2).front();
    }
    store->begin(numbers);
  });
}

// All ranks wait for each other. Each then goes on with another token.
void WindowBuilder::meet(const std::string& name) {
  if (dp_ == 1) return;
  for (RankState& state : ranks_) {
    const Buffer after = token(state, name);
    made_.graph.add({.name   = name + " window",
                     .reads  = state.ready,
                     .writes = after,
                     .part   = PartSpec{.group = together_, .op = PartOp::barrier, .message = name},
                     .kind   = NodeKind::communicate,
                     .op     = "gate",
                     .labels = {.phase = "gate"}});
    state.ready = after;
  }
}

// The parts of a gate are one task. It runs when the receiver has come to it and the other ranks are far enough. The
// other ranks do not wait for the task, because none of their nodes follows their parts. All ranks have the parts of
// all gates in the same order.
void WindowBuilder::add_gate(int step, int receiver) {
  const int completed = step - 1 - bound_;
  for (RankState& state : ranks_) {
    const bool receives = index(state.rank) == receiver;
    NodeSpec node{.name   = receives ? str("gate s", step) : str("mark s", completed, " for rank ", receiver),
                  .reads  = state.done[static_cast<std::size_t>(receives ? step - 1 : completed)],
                  .part   = PartSpec{.group   = gates_[static_cast<std::size_t>(receiver)],
                                     .op      = PartOp::barrier,
                                     .message = str("gate of rank ", receiver, " s", step)},
                  .kind   = NodeKind::communicate,
                  .op     = "gate",
                  .labels = {.phase = "gate"}};
    if (receives) {
      state.open = token(state, str("open s", step));
      node.writes.push_back(*state.open);
    }
    made_.graph.add(node);
  }
}

void WindowBuilder::add_take(RankState& state, int step, const StepRank& rank) {
  AccessList reads(step == 0 ? state.ready : state.done.back());
  if (state.open) reads.push_back(*std::exchange(state.open, std::nullopt));
  AccessList writes = all_values(state);
  writes.push_back(rank.taken);
  if (scales()) writes.push_back(rank.loss_scale);
  made_.graph.add({.name     = named("take newest version", step),
                   .lane     = Lane{state.rank, LaneKind::compute},
                   .reads    = reads,
                   .writes   = writes,
                   .kind     = NodeKind::copy,
                   .op       = "take_version",
                   .parallel = true,
                   .cost     = {.bytes_moved = 2 * value_bytes()},
                   .labels   = {.phase = "take"}},
                  [store = store_, step, count = weights_.size(), scales = scales()](const Context& context) {
                    std::vector<std::byte*> values;
                    for (std::size_t i = 0; i < count; ++i) values.push_back(written(context, i));
                    const VersionStore::Taken taken = store->take(context, step, values);
                    const auto report               = context.write<std::int64_t>(count);
                    report[0]                       = taken.version;
                    report[1]                       = taken.staleness;
                    if (scales) context.write<double>(count + 1).front() = taken.loss_scale;
                  });
}

void WindowBuilder::add_give(RankState& state, int step, const StepRank& rank, const std::vector<Buffer>& here) {
  AccessList reads;
  double elements = 0, bytes = 0;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    const StoredRange& gradient = alone().weights[shared_[i]].gradient;
    const auto size             = static_cast<std::int64_t>(size_bytes(weights_[i].gradient));
    reads.push_back(here[gradient.buffer.id].range(gradient.offset * size, gradient.size() * size));
    elements += static_cast<double>(weights_[i].elements);
    bytes += static_cast<double>(weights_[i].elements * (6 * size_bytes(weights_[i].wide) + size));
  }
  reads.push_back(here[alone().factor.id]);
  reads.push_back(rank.rate);
  reads.push_back(rank.num_ignored);
  reads.push_back(rank.num_ignored_of_all);
  if (scales()) reads.push_back(rank.loss_scale);
  state.done.push_back(token(state, named("done", step)));
  made_.graph.add({.name     = named("give gradient, make next version", step),
                   .lane     = Lane{state.rank, LaneKind::compute},
                   .reads    = reads,
                   .writes   = {rank.given, state.done.back()},
                   .op       = "give_gradient",
                   .parallel = true,
                   .cost     = {.flops = 15 * elements, .bytes_moved = bytes + 2 * value_bytes()},
                   .labels   = {.phase = "give"}},
                  [store = store_, rank = index(state.rank), count = weights_.size(), scales = scales(),
                   targets = std::int64_t{made_.batch.global} * made_.batch.seq, dp = dp_](const Context& context) {
                    std::vector<const std::byte*> gradients;
                    for (std::size_t i = 0; i < count; ++i) gradients.push_back(read_at(context, i));
                    // A rank's gradient is of the mean over its own targets. Those of all ranks together are to be of
                    // the mean over all.
                    const std::int64_t mine = targets / dp - context.read<std::int64_t>(count + 2).front();
                    const std::int64_t all  = targets - context.read<std::int64_t>(count + 3).front();
                    const double share =
                        mine == 0 ? std::nan("") : static_cast<double>(mine * dp) / static_cast<double>(all);
                    const std::optional<std::int64_t> version =
                        store->give(context, {.rank       = rank,
                                              .grads      = gradients,
                                              .rates      = context.read<double>(count + 1),
                                              .factor     = share * context.read<double>(count).front(),
                                              .overflows  = std::isnan(context.read<double>(count).front()),
                                              .loss_scale = scales ? context.read<double>(count + 4).front() : 1});
                    context.write<std::int64_t>().front() = version.value_or(-1);
                  });
}

// All ranks get the newest version, and the numbers that last.
void WindowBuilder::finish(RankState& state) {
  const StepRank& rank = made_.ranks.at(state.rank);
  AccessList writes    = all_values(state);
  writes.push_back(rank.num_updates);
  if (scales()) {
    writes.push_back(rank.loss_scale);
    writes.push_back(rank.good_steps);
  }
  const Buffer after = token(state, "finished");
  writes.push_back(after);
  made_.graph.add({.name     = "take last version",
                   .lane     = Lane{state.rank, LaneKind::compute},
                   .reads    = state.ready,
                   .writes   = writes,
                   .kind     = NodeKind::copy,
                   .op       = "take_version",
                   .parallel = true,
                   .cost     = {.bytes_moved = 2 * value_bytes()},
                   .labels   = {.phase = "take"}},
                  [store = store_, count = weights_.size(), scales = scales(), dp = dp_](const Context& context) {
                    std::vector<std::byte*> values;
                    for (std::size_t i = 0; i < count; ++i) values.push_back(written(context, i));
                    store->copy_newest(context, values);
                    const StoreNumbers& numbers                = store->numbers();
                    context.write<std::int64_t>(count).front() = numbers.num_updates;
                    if (!scales) return;
                    context.write<double>(count + 1).front()       = numbers.loss_scale;
                    context.write<std::int64_t>(count + 2).front() = numbers.good_updates / dp;
                  });
  state.ready = after;
}

// The store has given the rank's buffers back.
void WindowBuilder::close(const RankState& state) {
  NodeSpec node{.name   = "close versions",
                .lane   = Lane{state.rank, LaneKind::compute},
                .reads  = state.ready,
                .op     = "close_versions",
                .labels = {.phase = "close"}};
  for (const Owned& owned : state.owned) {
    for (const Buffer version : owned.versions) node.accumulates.push_back(version);
    const AccessList states = states_of(owned);
    for (const Access& each : states.view()) node.accumulates.push_back(each);
  }
  made_.graph.add(node, [] {});
}

}  // namespace stepgraph
