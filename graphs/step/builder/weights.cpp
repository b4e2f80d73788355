// Declares a rank's buffers for weights, gradients and optimizer state.
#include <algorithm>

#include "engine/base/error.hpp"
#include "graphs/models/weights.hpp"
#include "graphs/step/builder/builder.hpp"
#include "ops/transfers/reduce.hpp"

namespace stepgraph {
namespace {

std::string_view name_of(WeightTensor tensor, OptimizerKind optimizer) {
  switch (tensor) {
    case WeightTensor::value:
      return "";
    case WeightTensor::gradient:
      return "gradient of ";
    case WeightTensor::master:
      return "master of ";
    case WeightTensor::first_moment:
      return optimizer == OptimizerKind::adamw ? "mean of " : "velocity of ";
    case WeightTensor::second_moment:
      break;
  }
  return "square of ";
}

}  // namespace

const StepBuilder::UnitWeight* StepBuilder::unit_weight(const WeightSpec& spec) const {
  const auto found = unit_weights_.find(spec.name);
  return found == unit_weights_.end() ? nullptr : &found->second;
}

Access StepBuilder::access(const StoredRange& part) const {
  const auto size = static_cast<std::int64_t>(size_bytes(setup_.step.graph.spec(part.buffer).type));
  return part.buffer.range(part.offset * size, part.size() * size);
}

Member StepBuilder::member(std::string_view purpose, LaneKind lane) const {
  return {.rank  = rank_,
          .group = setup_.shard_group(coord_, purpose),
          .size  = shard_group_.size,
          .index = shard_group_.member,
          .lane  = lane};
}

// A buffer that the weights of a unit share, made for the first of them: the flat, the rank's shard of the flat, or the
// whole gradients.
Buffer StepBuilder::unit_buffer(Unit& unit, WeightTensor tensor, const WeightEntry& entry) {
  const bool in_flat = entry.placement == Placement::flat;
  Buffer& buffer     = in_flat ? unit.flat(tensor) : unit.gradients;
  if (buffer != Buffer{}) return buffer;
  std::string_view what = "gradients of ";
  std::int64_t elements = unit.spec->elements;
  if (in_flat) {
    const FlatShards& flat = *unit.spec->flat;
    what                   = name_of(tensor, setup_.plan.optimizer.kind);
    elements               = entry.extent == Extent::whole ? flat.padded_elements() : flat.shard_elements();
  }
  buffer = make(str(what, unit.spec->name), elements, entry.type, entry.lifetime, role_of(tensor), entry.space);
  return buffer;
}

// Declares the buffer for one entry of the table. An empty shard has no buffer, fill_buckets makes buckets, and
// share_tied_values sets the values of weights that are tied to one of the same rank.
StoredRange StepBuilder::declare_tensor(const WeightSpec& spec, WeightTensor tensor, const WeightEntry& entry) {
  if (entry.extent == Extent::none || entry.placement == Placement::bucket || entry.placement == Placement::tied)
    return {};
  const bool is_whole             = entry.extent == Extent::whole;
  const UnitWeight* const sharded = unit_weight(spec);
  const std::int64_t elements     = num_elements(local_shape(spec, tp_.size, tp_.index));
  const IndexRange range          = is_whole ? IndexRange{0, elements} : sharded->weight->range(shard_group_.member);
  StoredRange made{.begin = range.begin, .end = range.end, .sharded = !is_whole};
  const bool has_any = is_whole || range.size() > 0;
  if (entry.placement == Placement::own) {
    const std::string_view what = name_of(tensor, setup_.plan.optimizer.kind);
    if (has_any) {
      made.buffer = make(str(what, spec.name), range.size(), entry.type, entry.lifetime, role_of(tensor), entry.space);
    }
    return made;
  }
  Unit& unit          = units_[sharded->unit];
  const Buffer buffer = unit_buffer(unit, tensor, entry);
  if (has_any) {
    // A shard of a flat begins at the shard's first element, a whole buffer at the unit's.
    const bool in_shard = entry.placement == Placement::flat && !is_whole;
    made.buffer         = buffer;
    made.offset = sharded->weight->offset + range.begin - (in_shard ? unit.spec->flat->begin(shard_group_.member) : 0);
  }
  return made;
}

// Where the rank's shards of a unit are, as collectives take them.
UnitShards StepBuilder::shards_of(const Unit& unit, WeightTensor tensor) const {
  UnitShards found{.flat = unit.flat(tensor)};
  const auto& weights = setup_.step.ranks.at(rank_).weights;
  for (std::size_t i = 0; i < unit.weights.size(); ++i) {
    if (unit.spec->weights[i].flat) continue;
    const StoredRange& part = stored(weights[unit.weights[i]], tensor);
    found.others.push_back(part.empty() ? Access() : access(part));
  }
  return found;
}

void StepBuilder::declare_weight(Stage stage, std::size_t block, std::size_t number, bool trains) {
  const WeightSpec& spec          = setup_.step.model.blocks[block].weights[number];
  const UnitWeight* const sharded = unit_weight(spec);
  StepWeight weight{.block = block, .number = number, .stage = stage, .tied = !spec.tied_to.empty()};
  const WeightTraits traits{.norm         = spec.norm,
                            .sharded      = sharded != nullptr,
                            .flat         = sharded != nullptr && sharded->weight->flat,
                            .tied_here    = weight.tied && has(setup_.stage_of_weight.at(spec.tied_to)),
                            .joined_first = joins_first(weight)};
  const WeightStorageOptions options{
      .trains = trains, .keep_gradients = setup_.options.keep_gradients, .update_first = setup_.options.update_first};
  for (const WeightTensor tensor : all_weight_tensors) {
    stored(weight, tensor) = declare_tensor(spec, tensor, weight_entry(setup_.plan, traits, tensor, options));
  }
  if (sharded != nullptr) units_[sharded->unit].weights.push_back(here().weights.size());
  here().weights.push_back(weight);
}

// Whether the gradient of a tied weight is added to its owner's before both are reduced. Both are in buckets of one
// stage, so both are complete at the same time.
bool StepBuilder::joins_first(const StepWeight& weight) const {
  const WeightSpec& spec = setup_.step.spec(weight);
  if (!setup_.options.join_tied_first || spec.tied_to.empty() || setup_.plan.layout.dp == 1) return false;
  return setup_.stage_of_weight.at(spec.tied_to) == weight.stage && unit_weight(spec) == nullptr &&
         unit_weight(setup_.weight_named(spec.tied_to)) == nullptr;
}

// A weight that is tied to one of the same rank has its value. The owner may be declared later.
void StepBuilder::share_tied_values() {
  for (StepWeight& weight : here().weights) {
    if (!weight.tied) continue;
    const StepWeight* const owner = find_weight(setup_.step.spec(weight).tied_to);
    if (owner != nullptr) weight.value = owner->value;
  }
}

const StepWeight* StepBuilder::find_weight(const std::string& name) {
  const auto& weights = here().weights;
  const auto found    = std::find_if(weights.begin(), weights.end(),
                                     [&](const StepWeight& weight) { return setup_.step.spec(weight).name == name; });
  return found == weights.end() ? nullptr : &*found;
}

// Fills buckets with the weights of each stage that are not sharded, in the order of the backward pass.
void StepBuilder::fill_buckets() {
  const ShardPlan& plan = setup_.plan.shard;
  const auto size       = static_cast<double>(size_bytes(sum_type()));
  auto& weights         = here().weights;
  for (std::size_t i = weights.size(); i-- > 0;) {
    const WeightSpec& spec = setup_.step.spec(weights[i]);
    if (unit_weight(spec) != nullptr || joins_first(weights[i])) continue;
    const std::int64_t elements = num_elements(local_shape(spec, tp_.size, tp_.index));
    const bool goes_on          = !buckets_.empty() && buckets_.back().stage == weights[i].stage;
    const bool first   = !goes_on || buckets_.size() < 2 || buckets_[buckets_.size() - 2].stage != weights[i].stage;
    const double limit = (first && plan.first_bucket_mb > 0 ? plan.first_bucket_mb : plan.bucket_mb) * 0x1p20;
    const bool fits =
        goes_on && (plan.delay_all_reduce || static_cast<double>(buckets_.back().elements + elements) * size <= limit);
    if (!fits) buckets_.push_back({.stage = weights[i].stage});
    buckets_.back().weights.push_back(i);
    buckets_.back().elements += elements;
  }
  // With a delayed update and without views, buckets are used by the reduction alone: see reduce_earlier.
  const bool persist  = plan.bucket_views ? gradients_persist() : delays();
  const Lifetime kept = persist ? Lifetime::persistent : Lifetime::step;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket     = buckets_[b];
    bucket.buffer      = make(str("bucket ", b), bucket.elements, sum_type(), kept, MemoryRole::gradients);
    const DType travel = setup_.plan.precision.reduce_type();
    if (setup_.options.update_first && keeps_rounded_gradients() && travel != sum_type())
      bucket.rounded = make("rounded gradient of " + text_of(bucket), bucket.elements, travel, Lifetime::persistent,
                            MemoryRole::gradients);
    std::int64_t offset = 0;
    for (const std::size_t i : bucket.weights) {
      const std::int64_t elements = num_elements(local_shape(setup_.step.spec(weights[i]), tp_.size, tp_.index));
      StoredRange range{.buffer = bucket.buffer, .end = elements, .offset = offset};
      if (plan.bucket_views) weights[i].gradient = range;
      range.buffer = bucket.rounded;
      if (bucket.rounded != Buffer{}) applied_gradients_[i] = range;
      offset += elements;
    }
  }
}

// The whole weights that ops read, and the whole gradients that they add to.
void StepBuilder::add_to_table() {
  for (const StepWeight& weight : here().weights) {
    const WeightSpec& spec = setup_.step.spec(weight);
    WeightTable::Entry entry{.name  = spec.name,
                             .block = setup_.step.model.blocks[weight.block].name,
                             .shape = local_shape(spec, tp_.size, tp_.index)};
    const UnitWeight* const sharded = unit_weight(spec);
    const auto whole_part           = [&](Buffer whole, DType type) {
      const auto size = static_cast<std::int64_t>(size_bytes(type));
      return whole.range(sharded->weight->offset * size, sharded->weight->elements * size);
    };
    entry.value = sharded != nullptr && shards_values() ? whole_part(units_[sharded->unit].whole, setup_.step.type)
                                                        : access(weight.value);
    if (sharded != nullptr && units_[sharded->unit].gradients != Buffer{}) {
      entry.gradient = whole_part(units_[sharded->unit].gradients, sum_type());
    } else if (sharded == nullptr && weight.gradient.buffer != Buffer{}) {
      entry.gradient = access(weight.gradient);
    }
    table_.add(std::move(entry));
  }
}

void StepBuilder::declare_weights(bool trains) {
  for (const std::shared_ptr<const ShardUnit>& unit : setup_.units(coord_.tp)) {
    if (!has(unit->stage)) continue;
    units_.push_back({.spec = unit});
    for (const ShardedWeight& weight : unit->weights) {
      const std::string& name = setup_.step.model.blocks[weight.block].weights[weight.number].name;
      unit_weights_.emplace(name, UnitWeight{units_.size() - 1, &weight});
      if (!weight.flat) units_.back().others.push_back(name);
    }
  }
  for (int s = 0; s < setup_.num_stages(); ++s) {
    if (!has(Stage{s})) continue;
    for (const std::size_t block : setup_.blocks_of_stage[static_cast<std::size_t>(s)]) {
      const std::size_t count = setup_.step.model.blocks[block].weights.size();
      for (std::size_t number = 0; number < count; ++number) declare_weight(Stage{s}, block, number, trains);
    }
  }
  share_tied_values();
  for (Unit& unit : units_) {
    const std::int64_t elements = unit.spec->elements;
    if (shards_values()) unit.whole = make("whole " + unit.spec->name, elements, setup_.step.type, Lifetime::step);
    if (trains && !reduces_each() && unit.gradients == Buffer{}) {
      unit.gradients =
          make("gradients of " + unit.spec->name, elements, sum_type(), Lifetime::step, MemoryRole::gradients);
    }
  }
  if (trains && setup_.plan.layout.dp > 1) fill_buckets();
  add_to_table();
  if (trains && delays()) keep_accumulated();
  if (shards_values()) add_slots();
}

namespace {

UnitText gather_text(const ShardUnit& unit, const std::vector<std::string>& others, const Labels& at,
                     const AccessList& after) {
  const bool forward = at.phase == "forward";
  std::string name   = str(forward ? "F " : "B ", unit.name);
  if (at.microbatch >= 0) name += str(" mb", at.microbatch);
  return {.name   = std::move(name),
          .others = others,
          .labels = {.stage      = index(unit.stage),
                     .microbatch = at.microbatch,
                     .layer      = unit.layer,
                     .phase      = forward ? "forward" : "backward"},
          .after  = after};
}

// The same unit over fewer members. Each has the shards of several neighbours.
ShardUnit among_fewer(const ShardUnit& unit, int members) {
  ShardUnit fewer = unit;
  if (unit.flat) fewer.flat = FlatShards(unit.flat->padded_elements(), members);
  for (ShardedWeight& weight : fewer.weights) {
    weight.block_elements *= weight.num_members / members;
    weight.num_members = members;
  }
  return fewer;
}

}  // namespace

// Tells with_slots how to gather each unit's weights.
void StepBuilder::add_slots() {
  const DType type = setup_.step.type;
  for (const Unit& unit : units_) {
    UnitValues values{.whole      = unit.whole,
                      .unit       = unit.spec->name,
                      .size_bytes = unit.spec->elements * static_cast<std::int64_t>(size_bytes(type)),
                      .type       = type};
    values.gather = [type, spec = unit.spec, others = unit.others, from = shards_of(unit, WeightTensor::value),
                     by = member("gather", LaneKind::gather)](Graph& graph, Buffer slot, const Labels& at,
                                                              const AccessList& after) {
      gather_unit(graph, by, *spec, type, from, slot, gather_text(*spec, others, at, after));
    };
    if (setup_.plan.shard.reshard_group > 0) add_kept(unit, values);
    setup_.slots.values.push_back(std::move(values));
  }
}

// Until the backward pass, a few neighbours keep the gathered weights sharded between them.
void StepBuilder::add_kept(const Unit& unit, UnitValues& values) {
  const DType type = setup_.step.type;
  const int size   = setup_.plan.shard.reshard_group;
  const Member by{.rank  = rank_,
                  .group = setup_.reshard_group(coord_),
                  .size  = size,
                  .index = coord_.dp % size,
                  .lane  = LaneKind::gather};
  const auto fewer = std::make_shared<const ShardUnit>(among_fewer(*unit.spec, size));
  values.keep      = [=, others = unit.others](Graph& graph, Buffer slot, const Labels& at) {
    const UnitShards in_slot = shards_in_whole(*fewer, type, slot, by.index);
    const auto keep          = [&](const Access& from, const std::string& what) {
      const Buffer to =
          graph.buffer({.name = "kept " + what, .rank = by.rank, .size_bytes = from.region.num_bytes(), .type = type});
      copy(graph, {.name = "keep " + what, .lane = std::nullopt, .to = to, .from = from, .labels = at});
      return Access(to);
    };
    UnitShards kept;
    if (fewer->flat) kept.flat = keep(in_slot.flat, fewer->name);
    for (std::size_t i = 0; i < others.size(); ++i) {
      const bool has = in_slot.others[i].region.num_bytes() > 0;
      kept.others.push_back(has ? keep(in_slot.others[i], others[i]) : Access());
    }
    return kept;
  };
  values.gather_kept = [=, others = unit.others](Graph& graph, const UnitShards& kept, Buffer slot, const Labels& at,
                                                 const AccessList& after) {
    gather_unit(graph, by, *fewer, type, kept, slot, gather_text(*fewer, others, at, after));
  };
}

}  // namespace stepgraph
