// What a rank has of the weights, their gradients and the optimizer's state.
#include <algorithm>

#include "engine/base/error.hpp"
#include "graphs/models/weights.hpp"
#include "graphs/step/builder.hpp"
#include "ops/reduce.hpp"

namespace stepgraph {

bool StepBuilder::cuts_values() const {
  return setup_.plan.shard.strategy == Shard::full || setup_.plan.shard.strategy == Shard::hybrid;
}

const StepBuilder::Cut* StepBuilder::cut_of(const WeightSpec& spec) const {
  const auto found = cuts_.find(spec.name);
  return found == cuts_.end() ? nullptr : &found->second;
}

Access StepBuilder::access(const WeightPart& part) const {
  const auto size = static_cast<std::int64_t>(size_bytes(setup_.step.graph.spec(part.buffer).type));
  return part.buffer.range(part.offset * size, part.size() * size);
}

Member StepBuilder::member(std::string_view purpose, LaneKind lane) const {
  return {.rank  = rank_,
          .group = setup_.shard_group(coord_, purpose),
          .size  = shards_.size,
          .index = shards_.member,
          .lane  = lane};
}

// This member's part of a weight: in the part of the flat, which the first of its weights makes, or by itself.
WeightPart StepBuilder::part(const std::string& what, const Cut& cut, DType type, Lifetime lifetime,
                             Buffer Unit::*flat) {
  Unit& unit               = units_[cut.unit];
  const ElementRange range = cut.weight->ranges[static_cast<std::size_t>(shards_.member)];
  const WeightSpec& spec   = setup_.step.model.blocks[cut.weight->block].weights[cut.weight->number];
  WeightPart made{.begin = range.begin, .end = range.end, .cut = true};
  if (cut.weight->flat) {
    if (unit.*flat == Buffer{})
      unit.*flat = make(what + unit.cut->name, unit.cut->flat->shard_elements(), type, lifetime);
    if (range.size() > 0) made.offset = cut.weight->offset + range.begin - unit.cut->flat->begin(shards_.member);
    made.buffer = unit.*flat;
  } else if (range.size() > 0) {
    made.buffer = make(what + spec.name, range.size(), type, lifetime);
  }
  if (made.empty()) made.buffer = {};
  return made;
}

// Where the rank's parts of a unit are, as collectives take them.
UnitParts StepBuilder::parts(const Unit& unit, Buffer Unit::*flat, WeightPart StepWeight::*which) const {
  UnitParts found{.flat = unit.*flat};
  const auto& weights = setup_.step.ranks[static_cast<std::size_t>(index(rank_))].weights;
  for (std::size_t i = 0; i < unit.weights.size(); ++i) {
    if (unit.cut->weights[i].flat) continue;
    const WeightPart& part = weights[unit.weights[i]].*which;
    found.others.push_back(part.empty() ? Access() : access(part));
  }
  return found;
}

void StepBuilder::declare_weight(Stage stage, std::size_t block, std::size_t number, bool trains) {
  const WeightSpec& spec = setup_.step.model.blocks[block].weights[number];
  const DType type = setup_.step.value_type(spec), sums = wide_type(type);
  const std::int64_t elements = num_elements(local_shape(spec, tp_.size, tp_.index));
  const auto whole            = [&](const std::string& name, DType of, Lifetime lifetime) {
    return WeightPart{.buffer = make(name, elements, of, lifetime), .end = elements};
  };
  StepWeight weight{.block = block, .number = number, .stage = stage, .tied = !spec.tied_to.empty()};
  const Cut* const cut = cut_of(spec);
  if (cut != nullptr) units_[cut->unit].weights.push_back(here().weights.size());
  // A tied weight shares the value of the weight it is tied to, where that is on this rank, and its update.
  const bool shares = weight.tied && has(setup_.stage_of_weight.at(spec.tied_to));
  if (shares) {
    const auto& weights = here().weights;
    weight.value        = std::find_if(weights.begin(), weights.end(), [&](const StepWeight& other) {
                     return setup_.step.spec(other).name == spec.tied_to;
                   })->value;
  } else if (cut != nullptr && cuts_values()) {
    weight.value = part("", *cut, type, Lifetime::persistent, &Unit::values);
  } else if (cut != nullptr && cut->weight->flat) {
    Unit& unit = units_[cut->unit];
    if (unit.values == Buffer{}) {
      unit.values = make(unit.cut->name, unit.cut->flat->padded_elements(), type, Lifetime::persistent);
    }
    weight.value = {.buffer = unit.values, .end = elements, .offset = cut->weight->offset};
  } else {
    weight.value = whole(spec.name, type, Lifetime::persistent);
  }
  if (trains) {
    const Lifetime kept   = setup_.options.keep_gradients ? Lifetime::persistent : Lifetime::step;
    const bool adam       = setup_.plan.optimizer.kind == OptimizerKind::adamw;
    const auto state_part = [&](const std::string& what, Buffer Unit::*flat) {
      return cut != nullptr ? part(what, *cut, sums, Lifetime::persistent, flat)
                            : whole(what + spec.name, sums, Lifetime::persistent);
    };
    if (cut != nullptr && setup_.plan.shard.strategy == Shard::zero1 && !keeps_rounded_gradients()) {
      Unit& unit = units_[cut->unit];
      if (unit.gradients == Buffer{})
        unit.gradients = make("gradients of " + unit.cut->name, unit.cut->elements, sums, kept, MemoryRole::gradients);
      const ElementRange range = cut->weight->ranges[static_cast<std::size_t>(shards_.member)];
      weight.gradient          = {.buffer = unit.gradients,
                                  .begin  = range.begin,
                                  .end    = range.end,
                                  .offset = cut->weight->offset + range.begin,
                                  .cut    = true};
    } else if (cut != nullptr) {
      const DType as_kept = keeps_rounded_gradients() ? setup_.plan.precision.reduce : sums;
      weight.gradient     = part("gradient of ", *cut, as_kept, kept, &Unit::gradient);
    } else if (setup_.plan.layout.dp == 1 || !setup_.plan.shard.bucket_views) {
      weight.gradient = whole("gradient of " + spec.name, sums, kept);
    }
    if (!shares) {
      if (sums != type) weight.master = state_part("master of ", &Unit::master);
      weight.first = state_part(adam ? "mean of " : "velocity of ", &Unit::first);
      if (adam) weight.second = state_part("square of ", &Unit::second);
    }
  }
  here().weights.push_back(weight);
}

// Replicated weights of each stage, in the order in which the backward pass is done with them.
void StepBuilder::fill_buckets() {
  const ShardPlan& plan = setup_.plan.shard;
  const auto size       = static_cast<double>(size_bytes(sum_type()));
  auto& weights         = here().weights;
  for (std::size_t i = weights.size(); i-- > 0;) {
    const WeightSpec& spec = setup_.step.spec(weights[i]);
    if (cut_of(spec) != nullptr) continue;
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
  const Lifetime kept = setup_.options.keep_gradients && plan.bucket_views ? Lifetime::persistent : Lifetime::step;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    bucket.buffer  = make(str("bucket ", b), bucket.elements, sum_type(), kept, MemoryRole::gradients);
    if (!plan.bucket_views) continue;
    std::int64_t offset = 0;
    for (const std::size_t i : bucket.weights) {
      const std::int64_t elements = num_elements(local_shape(setup_.step.spec(weights[i]), tp_.size, tp_.index));
      weights[i].gradient         = {.buffer = bucket.buffer, .end = elements, .offset = offset};
      offset += elements;
    }
  }
}

// What ops read and add to: whole weights, whole gradients.
void StepBuilder::add_to_table() {
  for (const StepWeight& weight : here().weights) {
    const WeightSpec& spec = setup_.step.spec(weight);
    WeightTable::Entry entry{.name = spec.name, .shape = local_shape(spec, tp_.size, tp_.index)};
    const Cut* const cut  = cut_of(spec);
    const auto whole_part = [&](Buffer whole, DType type) {
      const auto size = static_cast<std::int64_t>(size_bytes(type));
      return whole.range(cut->weight->offset * size, cut->weight->elements * size);
    };
    entry.value =
        cut != nullptr && cuts_values() ? whole_part(units_[cut->unit].whole, setup_.step.type) : access(weight.value);
    if (cut != nullptr && units_[cut->unit].gradients != Buffer{}) {
      entry.gradient = whole_part(units_[cut->unit].gradients, sum_type());
    } else if (cut == nullptr && weight.gradient.buffer != Buffer{}) {
      entry.gradient = access(weight.gradient);
    }
    table_.add(std::move(entry));
  }
}

void StepBuilder::declare_weights(bool trains) {
  for (const std::shared_ptr<const ShardUnit>& unit : setup_.units(coord_.tp)) {
    if (!has(unit->stage)) continue;
    units_.push_back({.cut = unit});
    for (const CutWeight& weight : unit->weights) {
      const std::string& name = setup_.step.model.blocks[weight.block].weights[weight.number].name;
      cuts_.emplace(name, Cut{units_.size() - 1, &weight});
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
  for (Unit& unit : units_) {
    const std::int64_t elements = unit.cut->elements;
    if (cuts_values()) unit.whole = make("whole " + unit.cut->name, elements, setup_.step.type, Lifetime::step);
    if (trains && !reduces_each() && unit.gradients == Buffer{}) {
      unit.gradients =
          make("gradients of " + unit.cut->name, elements, sum_type(), Lifetime::step, MemoryRole::gradients);
    }
  }
  if (trains && setup_.plan.layout.dp > 1) fill_buckets();
  add_to_table();
  if (cuts_values()) add_slots();
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

// The same unit among fewer members, each of which has what several neighbours had.
ShardUnit among_fewer(const ShardUnit& unit, int members) {
  ShardUnit fewer = unit;
  if (unit.flat) fewer.flat = FlatShards(unit.flat->padded_elements(), members);
  for (CutWeight& weight : fewer.weights) {
    const std::size_t together = weight.ranges.size() / static_cast<std::size_t>(members);
    std::vector<ElementRange> ranges;
    for (std::size_t first = 0; first < weight.ranges.size(); first += together) {
      ranges.push_back({weight.ranges[first].begin, weight.ranges[first + together - 1].end});
    }
    weight.ranges = std::move(ranges);
  }
  return fewer;
}

}  // namespace

// How a unit's weights are gathered, for the pass that knows when.
void StepBuilder::add_slots() {
  const DType type = setup_.step.type;
  for (const Unit& unit : units_) {
    UnitValues values{.whole      = unit.whole,
                      .unit       = unit.cut->name,
                      .size_bytes = unit.cut->elements * static_cast<std::int64_t>(size_bytes(type)),
                      .type       = type};
    values.gather = [type, cut = unit.cut, others = unit.others, from = parts(unit, &Unit::values, &StepWeight::value),
                     by = member("gather", LaneKind::gather)](Graph& graph, Buffer slot, const Labels& at,
                                                              const AccessList& after) {
      gather_unit(graph, by, *cut, type, from, slot, gather_text(*cut, others, at, after));
    };
    if (setup_.plan.shard.reshard_group > 0) add_kept(unit, values);
    setup_.slots.values.push_back(std::move(values));
  }
}

// For the backward pass a few neighbours keep the whole between them.
void StepBuilder::add_kept(const Unit& unit, UnitValues& values) {
  const DType type = setup_.step.type;
  const int size   = setup_.plan.shard.reshard_group;
  const Member by{.rank  = rank_,
                  .group = setup_.reshard_group(coord_),
                  .size  = size,
                  .index = coord_.dp % size,
                  .lane  = LaneKind::gather};
  const auto fewer = std::make_shared<const ShardUnit>(among_fewer(*unit.cut, size));
  values.keep      = [=, others = unit.others](Graph& graph, Buffer slot, const Labels& at) {
    const UnitParts in_slot = parts_in_whole(*fewer, type, slot, by.index);
    const auto keep         = [&](const Access& from, const std::string& what) {
      const Buffer to =
          graph.buffer({.name = "kept " + what, .rank = by.rank, .size_bytes = from.region.num_bytes(), .type = type});
      copy(graph, {.name = "keep " + what, .lane = std::nullopt, .to = to, .from = from, .labels = at});
      return Access(to);
    };
    UnitParts kept;
    if (fewer->flat) kept.flat = keep(in_slot.flat, fewer->name);
    for (std::size_t i = 0; i < others.size(); ++i) {
      const bool has = in_slot.others[i].region.num_bytes() > 0;
      kept.others.push_back(has ? keep(in_slot.others[i], others[i]) : Access());
    }
    return kept;
  };
  values.gather_kept = [=, others = unit.others](Graph& graph, const UnitParts& kept, Buffer slot, const Labels& at,
                                                 const AccessList& after) {
    gather_unit(graph, by, *fewer, type, kept, slot, gather_text(*fewer, others, at, after));
  };
}

}  // namespace stepgraph
