// Reduces gradients over data-parallel ranks: whole in buckets, or into each rank's shard.
#include <algorithm>

#include "engine/base/error.hpp"
#include "graphs/step/builder/builder.hpp"
#include "ops/tape/streams.hpp"
#include "ops/transfers/clear.hpp"
#include "ops/transfers/convert.hpp"
#include "ops/transfers/reduce.hpp"

namespace stepgraph {
namespace {

// Gradients are summed in a wide type. Where they travel between data-parallel ranks in another type, they are rounded
// before and, unless they stay rounded, widened after.
struct Rounding {
  Rank rank  = {};
  DType type = DType::f32;  // in which they travel

  // A buffer with as many elements as `values` has.
  [[nodiscard]] Buffer make(Graph& graph, const std::string& name, const Access& values,
                            Lifetime lifetime = Lifetime::step) const {
    const auto size = static_cast<std::int64_t>(size_bytes(graph.spec(values.buffer).type));
    return graph.buffer({.name       = "rounded " + name,
                         .rank       = rank,
                         .size_bytes = num_bytes(graph, values) / size * static_cast<std::int64_t>(size_bytes(type)),
                         .type       = type,
                         .lifetime   = lifetime});
  }
  void round(Graph& graph, const std::string& name, const Access& to, const Access& from, const Labels& labels) const {
    convert(graph, {.name = "round " + name, .lane = LaneKind::reduce, .to = to, .from = from, .labels = labels});
  }
  void widen(Graph& graph, const std::string& name, const Access& to, const Access& from, const Labels& labels) const {
    convert(graph, {.name = "widen " + name, .lane = LaneKind::reduce, .to = to, .from = from, .labels = labels});
  }
};

// How the gradients of a unit become this rank's shard of their sum.
struct UnitReduction {
  Member by;
  std::shared_ptr<const ShardUnit> unit;
  DType sums, travel;  // in which they are accumulated, and sent
  bool keeps;          // the shard stays rounded
  Lifetime lifetime;   // of rounded copies
  UnitShards to, incoming;
  std::vector<std::string> others;
  std::shared_ptr<const std::vector<Cleared>> cleared = {};  // gradients that no op writes

  // `first`: the first microbatch, which is written instead of added.
  void add(Graph& graph, Buffer whole, const std::string& name, const Labels& labels, bool first,
           const AccessList& done) const {
    clear_padding(graph, *unit, sums, whole, labels);
    for (std::size_t i = 0; cleared && i < cleared->size(); ++i) {
      const auto& [weight, offset, size] = (*cleared)[i];
      clear(graph, {.name   = str("clear gradient of ", weight, " of ", name),
                    .values = whole.range(offset, size),
                    .labels = labels});
    }
    const UnitShards& target = first ? to : incoming;
    const UnitText text{.name = name, .others = others, .labels = labels};
    if (travel == sums) {
      reduce_scatter_unit(graph, by, *unit, sums, whole, target, text, done);
    } else {
      in_another_type(graph, whole, target, text, done);
    }
    if (first) return;
    each_shard([&](const Access& part, const Access& added, const std::string& what) {
      reduce_into(graph, {.name = str("add ", name, what), .into = part, .from = added, .labels = labels});
    });
  }

 private:
  template <class F>
  void each_shard(const F& f) const {
    if (unit->flat) f(to.flat, incoming.flat, std::string());
    for (std::size_t i = 0; i < to.others.size(); ++i) {
      if (to.others[i].buffer != Buffer{}) f(to.others[i], incoming.others[i], " " + others[i]);
    }
  }

  void in_another_type(Graph& graph, Buffer whole, const UnitShards& target, const UnitText& text,
                       const AccessList& done) const {
    const Rounding rounding{.rank = by.rank, .type = travel};
    const Access values  = whole.range(0, unit->elements * static_cast<std::int64_t>(size_bytes(sums)));
    const Buffer rounded = rounding.make(graph, text.name, values, lifetime);
    rounding.round(graph, text.name, rounded, values, text.labels);
    if (keeps) {
      reduce_scatter_unit(graph, by, *unit, travel, rounded, target, text, done);
      return;
    }
    UnitShards shards;
    if (unit->flat) shards.flat = rounding.make(graph, text.name + " part", target.flat, lifetime);
    for (std::size_t i = 0; i < target.others.size(); ++i) {
      const bool has = target.others[i].buffer != Buffer{};
      shards.others.push_back(
          has ? Access(rounding.make(graph, str(text.name, " part of ", others[i]), target.others[i], lifetime))
              : Access());
    }
    reduce_scatter_unit(graph, by, *unit, travel, rounded, shards, text, done);
    if (unit->flat) rounding.widen(graph, text.name, target.flat, shards.flat, text.labels);
    for (std::size_t i = 0; i < target.others.size(); ++i) {
      if (target.others[i].buffer == Buffer{}) continue;
      rounding.widen(graph, str(text.name, " ", others[i]), target.others[i], shards.others[i], text.labels);
    }
  }
};

}  // namespace

// With ReduceWhen::each, every microbatch has gradients of its own.
void StepBuilder::begin_gradients(const Action& action) {
  if (!reduces_each()) return;
  const int mb = index(action.microbatch);
  for (Unit& unit : units_) {
    if (unit.spec->stage != action.stage) continue;
    const auto size = static_cast<std::int64_t>(size_bytes(sum_type()));
    const Buffer whole =
        make(str("gradients of ", unit.spec->name, " mb", mb), unit.spec->elements, sum_type(), Lifetime::step);
    for (std::size_t i = 0; i < unit.weights.size(); ++i) {
      const ShardedWeight& weight = unit.spec->weights[i];
      WeightTable::Entry& entry   = table_[table_.find(setup_.step.spec(here().weights[unit.weights[i]]).name)];
      entry.gradient              = whole.range(weight.offset * size, weight.elements * size);
      entry.has_gradient          = false;
    }
    const bool first = unit.num_reduced++ == 0;
    unit.cleared     = std::make_shared<std::vector<Cleared>>();
    const UnitReduction reduction{.by       = member("reduce", LaneKind::reduce),
                                  .unit     = unit.spec,
                                  .sums     = sum_type(),
                                  .travel   = setup_.plan.precision.reduce_type(),
                                  .keeps    = keeps_rounded_gradients(),
                                  .lifetime = Lifetime::step,
                                  .to       = delays() ? unit.accumulated : shards_of(unit, WeightTensor::gradient),
                                  .incoming = first ? UnitShards{} : incoming_shards(unit),
                                  .others   = unit.others,
                                  .cleared  = unit.cleared};
    const Labels labels{.stage = index(action.stage), .microbatch = mb, .layer = unit.spec->layer, .phase = "reduce"};
    setup_.slots.gradients.push_back(
        {.whole      = whole,
         .unit       = unit.spec->name,
         .size_bytes = unit.spec->elements * size,
         .type       = sum_type(),
         .reduce     = [=, name = str(unit.spec->name, " mb", mb)](Graph& graph, Buffer slot, const AccessList& done) {
           reduction.add(graph, slot, name, labels, first, done);
         }});
  }
}

// Where the shard of a later microbatch arrives before it is added: one buffer for all units, which arrive one by one.
UnitShards StepBuilder::incoming_shards(const Unit& unit) {
  const auto size  = static_cast<std::int64_t>(size_bytes(sum_type()));
  const auto bytes = [&](const Unit& of) {
    std::int64_t elements = of.spec->flat ? of.spec->flat->shard_elements() : 0;
    for (const ShardedWeight& weight : of.spec->weights) {
      if (!weight.flat) elements += weight.range(shard_group_.member).size();
    }
    return elements;
  };
  if (incoming_ == Buffer{}) {
    std::int64_t most = 0;
    for (const Unit& each : units_) most = std::max(most, bytes(each));
    incoming_ = make("incoming gradients", most, sum_type(), Lifetime::step, MemoryRole::gradients);
  }
  UnitShards shards;
  std::int64_t offset = 0;
  if (unit.spec->flat) {
    offset      = unit.spec->flat->shard_elements();
    shards.flat = incoming_.range(0, offset * size);
  }
  for (const ShardedWeight& weight : unit.spec->weights) {
    if (weight.flat) continue;
    const std::int64_t elements = weight.range(shard_group_.member).size();
    shards.others.push_back(elements == 0 ? Access() : incoming_.range(offset * size, elements * size));
    offset += elements;
  }
  return shards;
}

// Gradients that no op writes are cleared when their unit is reduced: before that, the slot can have another tenant.
void StepBuilder::end_gradients(const Action& action) {
  if (!reduces_each()) return;
  for (const Unit& unit : units_) {
    if (unit.spec->stage != action.stage) continue;
    bool used = false;
    for (std::size_t i = 0; i < unit.weights.size(); ++i) {
      const StepWeight& weight  = here().weights[unit.weights[i]];
      const std::string& name   = setup_.step.spec(weight).name;
      WeightTable::Entry& entry = table_[table_.find(name)];
      used                      = used || entry.has_gradient;
      if (entry.has_gradient) continue;
      refuse_unused(weight);
      const bool last = i + 1 == unit.weights.size();
      if (last && !used) {  // no gradient of the unit is written: this node makes it a tenant of its slot
        clear(graph(), {.name   = "clear gradient of " + name,
                        .values = entry.gradient,
                        .labels = {.stage = index(weight.stage), .phase = "clear"}});
      } else {
        unit.cleared->push_back({name, entry.gradient.region.offset, entry.gradient.region.length});
      }
    }
  }
}

// Checks that some op adds to the weight's gradient; else the gradient is cleared, where the plan allows it.
void StepBuilder::check_used(const StepWeight& weight) {
  WeightTable::Entry& entry = table_[table_.find(setup_.step.spec(weight).name)];
  if (entry.has_gradient) return;
  refuse_unused(weight);
  clear(graph(), {.name   = "clear gradient of " + setup_.step.spec(weight).name,
                  .values = entry.gradient,
                  .labels = {.stage = index(weight.stage), .phase = "clear"}});
  entry.has_gradient = true;
}

void StepBuilder::refuse_unused(const StepWeight& weight) {
  const WeightSpec& spec = setup_.step.spec(weight);
  if (!setup_.plan.shard.find_unused_parameters) {
    throw Error(ErrorKind::config,
                str("weight '", spec.name, "' of block '", setup_.step.model.blocks[weight.block].name,
                    "': no op adds to its gradient (the forward pass reads it in an op with weight_gradients, and "
                    "every later op has on_backward; or shard.find_unused_parameters)"));
  }
  auto& unused = setup_.step.unused;
  if (std::find(unused.begin(), unused.end(), spec.name) == unused.end()) unused.push_back(spec.name);
}

// All-reduces gradients in the plan's reduce type. The world sums in a wide type and rounds once, as in a
// reduce-scatter. Returns where the sum is: another buffer, where gradients stay rounded.
Access StepBuilder::all_reduce_gradients(const std::string& what, Group group, int members, const Access& values,
                                         const Labels& labels, Buffer rounded) {
  const Rounding rounding{.rank = rank_, .type = setup_.plan.precision.reduce_type()};
  const std::string name = "all_reduce " + what;
  if (rounding.type == type_of(values.buffer)) {
    all_reduce(name, group, members, values, labels);
    return values;
  }
  const bool persists        = (keeps_rounded_gradients() && gradients_persist()) || delays();
  const std::uint32_t before = graph().num_buffers();
  if (rounded == Buffer{})
    rounded = rounding.make(graph(), what, values, persists ? Lifetime::persistent : Lifetime::step);
  mark_since(before, MemoryRole::gradients);
  rounding.round(graph(), what, rounded, values, labels);
  all_reduce(name, group, members, rounded, labels);
  if (keeps_rounded_gradients()) return rounded;
  rounding.widen(graph(), what, values, rounded, labels);
  return values;
}

std::string StepBuilder::text_of(const Bucket& bucket) {
  const std::string& first = setup_.step.spec(here().weights[bucket.weights.front()]).name;
  const std::string& last  = setup_.step.spec(here().weights[bucket.weights.back()]).name;
  return bucket.weights.size() == 1 ? first : str(first, " to ", last);
}

void StepBuilder::reduce_bucket(const Bucket& bucket, const Labels& labels) {
  const Group group   = setup_.group(rank_, Axis::dp, "gradients");
  const int members   = setup_.plan.layout.dp;
  const auto copy_all = [&](bool in) {
    std::int64_t offset = 0;
    for (const std::size_t i : bucket.weights) {
      const StoredRange& gradient = here().weights[i].gradient;
      const Access own            = access(gradient);
      const Access there          = access({.buffer = bucket.buffer, .end = gradient.size(), .offset = offset});
      const std::string& name     = setup_.step.spec(here().weights[i]).name;
      copy(graph(), {.name   = str(in ? "copy in gradient of " : "copy out gradient of ", name),
                     .lane   = LaneKind::reduce,
                     .to     = in ? there : own,
                     .from   = in ? own : there,
                     .labels = labels});
      offset += gradient.size();
    }
  };
  const bool views = setup_.plan.shard.bucket_views;
  if (!views) copy_all(true);
  const Buffer sum =
      all_reduce_gradients("gradient of " + text_of(bucket), group, members, bucket.buffer, labels, bucket.rounded)
          .buffer;
  if (sum != bucket.buffer) {
    std::int64_t offset = 0;
    for (const std::size_t i : bucket.weights) {
      StoredRange& gradient = here().weights[i].gradient;
      gradient.buffer       = sum;
      gradient.offset       = offset;
      offset += gradient.size();
    }
    return;
  }
  if (!views) copy_all(false);
}

// Reduces the whole gradients of a unit, summed over microbatches, into the rank's shard.
void StepBuilder::reduce_unit(Unit& unit, const Labels& labels) {
  const bool in_place = setup_.plan.shard.strategy == Shard::zero1 && !keeps_rounded_gradients();
  const UnitReduction reduction{.by       = member("reduce", LaneKind::reduce),
                                .unit     = unit.spec,
                                .sums     = sum_type(),
                                .travel   = setup_.plan.precision.reduce_type(),
                                .keeps    = keeps_rounded_gradients(),
                                .lifetime = delays() ? Lifetime::persistent : Lifetime::step,
                                .to       = in_place
                                                ? shards_in_whole(*unit.spec, sum_type(), unit.gradients, shard_group_.member)
                                                : shards_of(unit, WeightTensor::gradient),
                                .incoming = {},
                                .others   = unit.others};
  const std::uint32_t before = graph().num_buffers();
  reduction.add(graph(), unit.gradients, unit.spec->name, labels, true, {});
  mark_since(before, MemoryRole::gradients);  // rounded copies
}

// Sums a unit's gradients over the ranks with the same shard in other shard groups.
void StepBuilder::join_replicas(const Unit& unit, const Labels& labels) {
  const UnitShards all = shards_of(unit, WeightTensor::gradient);
  const int members    = setup_.plan.layout.dp / shard_group_.size;
  const auto join      = [&](const Access& part, const std::string& what) {
    all_reduce_gradients("replicas of " + what, setup_.replica_group(coord_), members, part, labels);
  };
  if (unit.spec->flat) join(all.flat, unit.spec->name);
  for (std::size_t i = 0; i < all.others.size(); ++i) {
    if (all.others[i].buffer != Buffer{}) join(all.others[i], unit.others[i]);
  }
}

void StepBuilder::check_all_used(Stage stage) {
  const auto& weights = here().weights;
  for (auto weight = weights.rbegin(); weight != weights.rend(); ++weight) {
    if (weight->stage == stage && !(reduces_each() && unit_weight(setup_.step.spec(*weight)))) check_used(*weight);
  }
}

// Reduces a stage's complete gradients over data-parallel ranks, in the order in which backward finished them. Where
// several tensor-parallel ranks hold the same piece, each has the gradient of its own use; these are summed too.
void StepBuilder::reduce_gradients(Stage stage) {
  auto& weights        = here().weights;
  const auto labels_of = [&](int layer) { return Labels{.stage = index(stage), .layer = layer, .phase = "reduce"}; };
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    if (unit->spec->stage != stage) continue;
    if (!reduces_each()) reduce_unit(*unit, labels_of(unit->spec->layer));
    if (shard_group_.size < setup_.plan.layout.dp) join_replicas(*unit, labels_of(unit->spec->layer));
  }
  for (const StepWeight& weight : weights) {
    if (weight.stage == stage && joins_first(weight))
      add_tied_gradient(*find_weight(setup_.step.spec(weight).tied_to), weight, labels_of(-1));
  }
  for (const Bucket& bucket : buckets_) {
    if (bucket.stage != stage) continue;
    const int layer = setup_.step.model.blocks[weights[bucket.weights.front()].block].layer;
    reduce_bucket(bucket, labels_of(bucket.weights.size() == 1 ? layer : -1));
  }
  for (auto weight = weights.rbegin(); weight != weights.rend(); ++weight) {
    if (weight->stage != stage || weight->gradient.empty() || joins_first(*weight)) continue;
    join_tensor_parallel(*weight, labels_of(setup_.step.model.blocks[weight->block].layer));
  }
}

void StepBuilder::join_tensor_parallel(const StepWeight& weight, const Labels& labels) {
  const WeightSpec& spec = setup_.step.spec(weight);
  if (!spec.cut) {
    if (!setup_.sequence_parallel()) return;
    all_reduce("all_reduce shares of gradient of " + spec.name, setup_.group(rank_, Axis::tp, "shares"), tp_.size,
               access(weight.gradient), labels);
    return;
  }
  for (const TpPiece& piece : tp_pieces(spec, tp_.size, tp_.index)) {
    if (piece.num_holders == 1) continue;
    if (spec.dim != 0) {
      throw Error(
          ErrorKind::config,
          str("weight '", spec.name, "': several ranks share a piece, but it is cut along dim ", spec.dim, " (dim 0)"));
    }
    const StoredRange shared = in_piece(weight.gradient, spec, piece);
    if (shared.empty()) continue;
    all_reduce("all_reduce shared gradient of " + piece.tensor, setup_.shared_group(piece.num_holders, coord_),
               piece.num_holders, access(shared), labels);
  }
}

}  // namespace stepgraph
