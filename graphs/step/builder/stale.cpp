// Updates that are applied some steps later (UpdatePlan::delays). In the run of step s:
//   - gradients of step s are accumulated, as in every step;
//   - gradients of step s - 1, which this rank has accumulated in the run before, are reduced. The forward and backward
//     passes do not wait for this;
//   - gradients of step s - k, which were reduced k - 1 runs before, are applied;
//   - all sets become one step older.
#include <algorithm>
#include <map>

#include "graphs/step/builder/builder.hpp"
#include "ops/transfers/reduce.hpp"
#include "ops/updates/loss_scale.hpp"

namespace stepgraph {
namespace {

std::string with_age(std::string_view name, int age) {
  return str(name, ", ", age, age == 1 ? " step old" : " steps old");
}

// Accesses to one buffer, in the order of their bytes. Neighbours are joined.
std::vector<Access> joined_ranges(std::vector<Access> parts) {
  std::ranges::sort(parts, {}, [](const Access& part) { return part.region.offset; });
  std::vector<Access> made;
  for (const Access& part : parts) {
    if (!made.empty() && made.back().region.offset + made.back().region.length == part.region.offset) {
      made.back().region.length += part.region.length;
    } else {
      made.push_back(part);
    }
  }
  return made;
}

}  // namespace

void StepBuilder::declare_sets() {
  std::vector<GradientSet>& sets = here().sets;
  sets.resize(static_cast<std::size_t>(setup_.plan.update.max_staleness) + 1);
  const bool scales = setup_.plan.precision.scales();
  sets[0].scale     = make("scale of gradients", 1, DType::f64, scales ? Lifetime::step : Lifetime::persistent);
  for (int age = 1; age < static_cast<int>(sets.size()); ++age) {
    GradientSet& set = sets[static_cast<std::size_t>(age)];
    set.scale        = make(with_age("scale of gradients", age), 1, DType::f64, Lifetime::persistent);
    if (age > 1) set.factor = make(with_age("clip factor", age), 1, DType::f64, Lifetime::persistent);
  }
}

// Ops add to the buffers in table_. The reduction, and all nodes after it, use StepWeight::gradient and the buffers of
// units and buckets. Here these are replaced by buffers that have the gradients of the step before.
void StepBuilder::keep_accumulated() {
  std::map<std::uint32_t, std::vector<Access>> written;  // by buffer: all but padding
  for (const StepWeight& weight : here().weights) {
    const Access gradient = table_[table_.find(setup_.step.spec(weight).name)].gradient;
    written[gradient.buffer.id].push_back(gradient);
  }
  std::map<std::uint32_t, Buffer> older;  // by buffer
  const auto replace = [&](Buffer& buffer, Stage stage) {
    if (buffer == Buffer{}) return;
    const auto [known, is_new] = older.try_emplace(buffer.id);
    if (is_new) {
      const BufferSpec spec       = graph().spec(buffer);
      const std::int64_t elements = spec.size_bytes / static_cast<std::int64_t>(size_bytes(spec.type));
      known->second = make(with_age(spec.name, 1), elements, spec.type, Lifetime::persistent, MemoryRole::gradients);
      here().sets[1].gradients.push_back(known->second);
      const auto ranges = written.find(buffer.id);
      accumulated_.push_back({.older  = known->second,
                              .stage  = stage,
                              .ranges = ranges == written.end()
                                            ? AccessList(buffer)
                                            : AccessList(joined_ranges(std::move(ranges->second)))});
    }
    buffer = known->second;
  };
  for (Unit& unit : units_) {
    if (reduces_each()) {
      unit.accumulated = shards_of(unit, WeightTensor::gradient);
      replace(unit.flat(WeightTensor::gradient), unit.spec->stage);
    } else {
      replace(unit.gradients, unit.spec->stage);
    }
  }
  if (setup_.plan.shard.bucket_views) {
    for (Bucket& bucket : buckets_) replace(bucket.buffer, bucket.stage);
  }
  for (StepWeight& weight : here().weights) {
    // The shard of a unit that is reduced once is made by the reduction, unless it is a part of the unit's gradients.
    Buffer& buffer    = weight.gradient.buffer;
    const bool is_sum = unit_weight(setup_.step.spec(weight)) != nullptr && !reduces_each();
    if (!is_sum || older.contains(buffer.id)) replace(buffer, weight.stage);
  }
}

// Buffers of the reduction are persistent: memory that they share with the passes would make one wait for the other.
void StepBuilder::reduce_earlier() {
  for (const Action& action : setup_.step.schedule.rows[static_cast<std::size_t>(coord_.pp)]) {
    if (action.kind == ActionKind::reduce_grad) reduce_gradients(action.stage);
  }
  join_tied_weights();
  keep_reduced();
}

// Copies of the gradients that this rank applies, for each age from 2 steps on. The oldest are applied.
void StepBuilder::keep_reduced() {
  std::vector<GradientSet>& sets = here().sets;
  if (sets.size() <= 2) return;
  std::map<std::uint32_t, std::vector<std::size_t>> weights_in;  // by buffer
  const auto& weights = here().weights;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!weights[i].first.empty()) weights_in[weights[i].gradient.buffer.id].push_back(i);
  }
  for (auto& [id, list] : weights_in) {
    std::ranges::sort(list, {}, [&](std::size_t i) { return weights[i].gradient.offset; });
    std::int64_t elements = 0;
    std::vector<Access> parts;
    for (const std::size_t i : list) {
      parts.push_back(access(weights[i].gradient));
      StoredRange& applied = applied_gradients_[i];
      applied              = weights[i].gradient;
      applied.offset       = elements;
      elements += applied.size();
    }
    Reduced made{.ranges = joined_ranges(std::move(parts)), .stage = weights[list.front()].stage};
    std::string name(graph().spec(Buffer{id}).name);
    if (const std::string end = with_age("", 1); name.ends_with(end)) name.resize(name.size() - end.size());
    for (int age = 2; age < static_cast<int>(sets.size()); ++age) {
      made.older.push_back(
          make(with_age(name, age), elements, type_of(Buffer{id}), Lifetime::persistent, MemoryRole::gradients));
      sets[static_cast<std::size_t>(age)].gradients.push_back(made.older.back());
    }
    for (const std::size_t i : list) applied_gradients_[i].buffer = made.older.back();
    reduced_.push_back(std::move(made));
  }
}

Buffer StepBuilder::applied_factor() {
  const Buffer oldest = here().sets.back().factor;
  return oldest == Buffer{} ? here().factor : oldest;
}

// The scale of this step's gradients is noted before it changes.
void StepBuilder::count_applied() {
  const std::vector<GradientSet>& sets = here().sets;
  const PrecisionPlan& precision       = setup_.plan.precision;
  const Labels labels{.phase = "clip"};
  CountUpdate count{
      .factor = applied_factor(), .set_scale = sets.back().scale, .num_updates = here().num_updates, .labels = labels};
  if (precision.scales()) {
    copy(graph(), {.name   = "note loss scale",
                   .lane   = std::nullopt,
                   .to     = sets[0].scale,
                   .from   = here().loss_scale,
                   .labels = labels});
    count.scale        = here().loss_scale;
    count.good_steps   = here().good_steps;
    count.dynamic      = precision.scaling() == Scaling::dynamic;
    count.growth_steps = precision.loss_scale.growth_steps;
  }
  count_update(graph(), count);
}

// The oldest first: each copy overwrites what the one before it has read.
void StepBuilder::shift_sets() {
  const std::vector<GradientSet>& sets = here().sets;
  const auto shift                     = [&](const AccessList& to, const AccessList& from, int stage = -1) {
    copy(graph(), {.name   = str("keep ", graph().spec(to.view().front().buffer).name),
                                       .lane   = std::nullopt,
                                       .to     = to,
                                       .from   = from,
                                       .labels = {.stage = stage, .phase = std::string(shift_phase)}});
  };
  for (std::size_t age = sets.size() - 1; age > 0; --age) {
    for (const Reduced& each : reduced_) {
      if (age >= 2) shift(each.older[age - 2], age == 2 ? each.ranges : each.older[age - 3], index(each.stage));
    }
    if (age >= 2) shift(sets[age].factor, age == 2 ? here().factor : sets[age - 1].factor);
    shift(sets[age].scale, sets[age - 1].scale);
  }
  for (const Accumulated& each : accumulated_) {
    AccessList to;
    for (const Access& part : each.ranges.view()) to.push_back({each.older, part.region});
    shift(to, each.ranges, index(each.stage));
  }
}

}  // namespace stepgraph
