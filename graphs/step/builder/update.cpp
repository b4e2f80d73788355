// The end of a training step: tied gradients, the global norm, the update.
#include <algorithm>
#include <map>
#include <utility>

#include "engine/base/error.hpp"
#include "graphs/models/weights.hpp"
#include "graphs/step/builder/builder.hpp"
#include "graphs/step/offload/choose/choose.hpp"
#include "ops/tape/streams.hpp"
#include "ops/transfers/clear.hpp"
#include "ops/transfers/convert.hpp"
#include "ops/transfers/reduce.hpp"
#include "ops/updates/loss_scale.hpp"
#include "ops/updates/optimizer.hpp"

namespace stepgraph {

namespace {

StoredRange within(const StoredRange& part, std::int64_t begin, std::int64_t end) {
  begin = std::clamp(begin, part.begin, part.end);
  end   = std::clamp(end, begin, part.end);
  return {.buffer = part.buffer, .begin = begin, .end = end, .offset = part.offset + begin - part.begin};
}

}  // namespace

// The elements of a stored range that lie in a piece. The weight is cut along dim 0.
StoredRange StepBuilder::in_piece(const StoredRange& part, const WeightSpec& spec, const TpPiece& piece) const {
  const TensorShape shape = local_shape(spec, tp_.size, tp_.index);
  const std::int64_t row  = num_elements(shape) / shape[0];
  return within(part, piece.local * row, (piece.local + piece.size) * row);
}

// This rank's part of an all-reduce in place.
void StepBuilder::all_reduce(const std::string& name, Group group, int members, const Access& values,
                             const Labels& labels) {
  add_part(graph(), {.name        = name,
                     .rank        = rank_,
                     .group       = group,
                     .op          = PartOp::all_reduce,
                     .type        = type_of(values.buffer),
                     .accumulates = values,
                     .bytes       = num_bytes(graph(), values),
                     .members     = members,
                     .labels      = labels});
}

// Adds the gradients of weights that are tied to one owner: the owner's first, then those of the tied weights in their
// order. Each is already summed over microbatches and data-parallel ranks. Some were added before (joins_first).
void StepBuilder::join_tied_weights() {
  std::map<std::string, std::vector<const WeightSpec*>> tied;  // by owner
  for (const Block& block : setup_.step.model.blocks) {
    for (const WeightSpec& spec : block.weights) {
      if (!spec.tied_to.empty()) tied[spec.tied_to].push_back(&spec);
    }
  }
  for (const Block& block : setup_.step.model.blocks) {
    for (const WeightSpec& spec : block.weights) {
      if (const auto found = tied.find(spec.name); found != tied.end()) join_tied_ranks(spec, found->second);
    }
  }
}

// Both are on this rank.
void StepBuilder::add_tied_gradient(const StepWeight& owner, const StepWeight& tied, const Labels& labels) {
  reduce_into(graph(), {.name   = "add gradient of " + setup_.step.spec(tied).name,
                        .lane   = std::nullopt,
                        .into   = access(owner.gradient),
                        .from   = access(tied.gradient),
                        .labels = labels});
}

// The owner's rank adds the gradients one after another, so that the bits of the sum do not depend on the pipeline
// split, and sends the sum back. Two gradients are one all-reduce.
void StepBuilder::join_tied_ranks(const WeightSpec& owner, const std::vector<const WeightSpec*>& tied) {
  const StepWeight* const own = find_weight(owner.name);
  const Rank root             = setup_.rank_of(setup_.stage_of_weight.at(owner.name), coord_);
  const Labels labels{.phase = "reduce"};
  std::vector<std::pair<const WeightSpec*, const StepWeight*>> elsewhere;  // tied weights on other ranks
  const auto add_part_of = [&](const WeightSpec& spec, const StepWeight& mine, PartOp op) {
    const Access values = access(mine.gradient);
    const bool writes   = op != PartOp::reduce || rank_ == root;
    const bool reads    = op != PartOp::broadcast || rank_ == root;
    PartNode node{.name   = str(to_string(op), " tied gradient of ", tied.size() == 1 ? owner.name : spec.name),
                  .rank   = rank_,
                  .group  = setup_.tied_group(spec, coord_),
                  .op     = op,
                  .type   = type_of(values.buffer),
                  .root   = op == PartOp::all_reduce ? Rank{-1} : root,
                  .bytes  = num_bytes(graph(), values),
                  .labels = labels};
    (reads && writes ? node.accumulates : reads ? node.reads : node.writes) = values;
    add_part(graph(), node);
  };
  for (const WeightSpec* spec : tied) {
    const StepWeight* const there = find_weight(spec->name);
    const bool with_owner         = setup_.rank_of(setup_.stage_of_weight.at(spec->name), coord_) == root;
    const StepWeight* const mine  = own != nullptr ? own : there;
    if (mine == nullptr || mine->gradient.empty()) continue;
    if (with_owner) {
      if (own == nullptr) continue;
      if (!joins_first(*there)) add_tied_gradient(*own, *there, labels);
    } else {
      add_part_of(*spec, *mine, tied.size() == 1 ? PartOp::all_reduce : PartOp::reduce);
      elsewhere.emplace_back(spec, mine);
    }
  }
  if (tied.size() == 1) return;
  for (const auto& [spec, mine] : elsewhere) add_part_of(*spec, *mine, PartOp::broadcast);
}

// Sums the squares of every element once over all ranks. The squares of a weight that is not sharded are summed by the
// data-parallel rank with the fewest elements so far; those of a piece that several tensor-parallel ranks hold, by the
// first of these. Squares are summed without rounding, so this choice changes no bit.
void StepBuilder::add_norm() {
  squares_ = make("squares", exact_sum_size(sum_type()), DType::i64, Lifetime::step);
  if (!setup_.options.update_first) here().factor = make("clip factor", 1, DType::f64, Lifetime::step);
  const Labels labels = {.phase = "norm"};
  clear(graph(), {.name = "clear squares", .values = squares_, .labels = {.phase = "clear"}});
  const ShardGroup sharers = setup_.norm_sharers(coord_.dp);
  // By sharer. Of more sharers than weights, the first ones get one each.
  const auto num_weights = std::max<std::size_t>(1, here().weights.size());
  std::vector<std::int64_t> elements(std::min(static_cast<std::size_t>(sharers.size), num_weights), 0);
  const auto is_mine = [&](const StepWeight& weight) {
    if (unit_weight(setup_.step.spec(weight)) != nullptr) return true;  // every rank has its own shard
    const auto least = std::min_element(elements.begin(), elements.end());
    *least += weight.gradient.size();
    return least - elements.begin() == sharers.member;
  };
  for (const StepWeight& weight : here().weights) {
    const WeightSpec& spec = setup_.step.spec(weight);
    if (weight.tied || !is_mine(weight)) continue;
    // On the compute lane, after the last backward. Beside the backward pass they would take threads from larger
    // kernels.
    const auto add = [&](const std::string& name, const StoredRange& values) {
      if (values.empty()) return;
      square_sum(graph(), {.name = "square_sum " + name, .values = access(values), .sum = squares_, .labels = labels});
    };
    const auto pieces = tp_pieces(spec, tp_.size, tp_.index);
    const bool all    = std::all_of(pieces.begin(), pieces.end(), [](const auto& piece) { return piece.first_holder; });
    if (all) {
      add(spec.name, weight.gradient);
      continue;
    }
    for (const TpPiece& piece : pieces) {
      if (piece.first_holder) add(piece.tensor, in_piece(weight.gradient, spec, piece));
    }
  }
  const int members = sharers.size * setup_.plan.layout.tp * setup_.plan.layout.pp;
  if (members > 1) {
    all_reduce("all_reduce squares", setup_.norm_group(coord_), members, squares_, labels);
  }
  ClipFactor clip{.squares = squares_,
                  .type    = sum_type(),
                  .norm    = here().grad_norm,
                  .factor  = here().factor,
                  .clip    = setup_.plan.optimizer.clip,
                  .labels  = {.phase = "clip"}};
  const bool scales = setup_.plan.precision.scales();
  if (delays()) {
    clip.scale    = here().sets[1].scale;
    clip.overflow = scales ? here().skipped : make("overflow", 1, DType::i64, Lifetime::step);
  } else if (scales) {
    clip.scale    = here().loss_scale;
    clip.overflow = here().skipped;
  }
  clip_factor(graph(), clip);
}

bool StepBuilder::updates_early() const {
  return stepgraph::updates_early(setup_.plan) && !setup_.options.update_first;
}

// The clip factor of an empty sum of squares.
Buffer StepBuilder::no_clipping() {
  if (no_clipping_ != Buffer{}) return no_clipping_;
  const Buffer squares = make("no squares", exact_sum_size(sum_type()), DType::i64, Lifetime::step);
  const Buffer norm    = make("no norm", 1, DType::f64, Lifetime::step);
  no_clipping_         = make("update factor", 1, DType::f64, Lifetime::step);
  const Labels labels{.phase = "clear"};
  clear(graph(), {.name = "clear no squares", .values = squares, .labels = labels});
  clip_factor(graph(), {.name    = "no clipping",
                        .squares = squares,
                        .type    = sum_type(),
                        .norm    = norm,
                        .factor  = no_clipping_,
                        .labels  = labels});
  return no_clipping_;
}

void StepBuilder::add_loss_scale() {
  const PrecisionPlan& precision = setup_.plan.precision;
  if (!precision.scales()) return;
  update_loss_scale(graph(), {.overflow     = here().skipped,
                              .scale        = here().loss_scale,
                              .good_steps   = here().good_steps,
                              .num_updates  = here().num_updates,
                              .dynamic      = precision.scaling() == Scaling::dynamic,
                              .growth_steps = precision.loss_scale.growth_steps,
                              .labels       = {.phase = "clip"}});
}

namespace {

// Elements of a rank's weight that are in one optimizer group.
struct GroupRange {
  int group;
  IndexRange elements;
  std::string name;  // of the first tensor in it
};

// The groups of a weight's elements, in order; neighbours in one group are one range. Tensors of a weight lie end to
// end along its dim; where it is not the first, they can only be in one group.
std::vector<GroupRange> group_ranges(const std::vector<OptimizerGroup>& groups, const WeightSpec& spec, int tp_size,
                                     int tp_index) {
  const TensorShape shape     = local_shape(spec, tp_size, tp_index);
  const std::int64_t elements = num_elements(shape);
  std::vector<GroupRange> ranges;
  for (const TpPiece& piece : tp_pieces(spec, tp_size, tp_index)) {
    const int group            = group_of(groups, piece.tensor);
    const std::int64_t row     = spec.dim == 0 && shape[0] > 0 ? elements / shape[0] : 0;
    const IndexRange its_range = {piece.local * row, (piece.local + piece.size) * row};
    if (!ranges.empty() && ranges.back().group == group) {
      ranges.back().elements.end = its_range.end;
      continue;
    }
    if (!ranges.empty() && spec.dim != 0)
      throw Error(ErrorKind::config, str("optimizer.groups: ", ranges.back().name, " and ", piece.tensor,
                                         " are in different groups, but are columns of one weight (", spec.name,
                                         "), which is updated as a whole (one group for both)"));
    ranges.push_back({group, its_range, piece.tensor});
  }
  if (ranges.size() == 1) ranges.front().elements = {0, elements};
  return ranges;
}

}  // namespace

void StepBuilder::add_updates() {
  for (const StepWeight& weight : here().weights) add_update(weight);
  for (const Unit& unit : units_) gather_updated(unit);
}

void StepBuilder::update_stage(Stage stage) {
  for (const std::size_t block : setup_.blocks_of_stage[static_cast<std::size_t>(index(stage))]) update_block(block);
}

void StepBuilder::update_block(std::size_t block) {
  for (std::size_t i = 0; i < here().weights.size(); ++i) {
    if (here().weights[i].block == block) update_weight(i);
  }
}

// All weights of a unit are updated together, and then gathered. A tied weight has the value of its owner.
void StepBuilder::update_weight(std::size_t i) {
  updated_.resize(here().weights.size(), false);
  if (updated_[i]) return;
  const WeightSpec& spec = setup_.step.spec(here().weights[i]);
  if (const UnitWeight* const sharded = unit_weight(spec); sharded != nullptr) {
    const Unit& unit = units_[sharded->unit];
    for (const std::size_t each : unit.weights) {
      updated_[each] = true;
      add_update(here().weights[each]);
    }
    gather_updated(unit);
  } else {
    updated_[i] = true;
    add_update(here().weights[i]);
  }
  const StepWeight* const owner = spec.tied_to.empty() ? nullptr : find_weight(spec.tied_to);
  if (owner != nullptr) update_weight(static_cast<std::size_t>(owner - here().weights.data()));
}

void StepBuilder::add_update(const StepWeight& weight) {
  if (weight.first.empty()) return;  // a tied weight, or an empty shard
  const WeightSpec& spec = setup_.step.spec(weight);
  // A tied weight of another rank than its owner's updates a copy, and is in the owner's group.
  const WeightSpec& owner = spec.tied_to.empty() ? spec : setup_.weight_named(spec.tied_to);
  auto ranges             = group_ranges(setup_.plan.optimizer.groups, owner, tp_.size, tp_.index);
  if (ranges.size() == 1) ranges.front().name = spec.name;
  for (const GroupRange& range : ranges) add_update(weight, range.group, range.elements, range.name);
}

// Updates the elements of the weight in this range that the rank stores.
void StepBuilder::add_update(const StepWeight& weight, int group, const IndexRange& elements, const std::string& name) {
  const OptimizerPlan& plan = setup_.plan.optimizer;
  const auto part           = [&](const StoredRange& of) { return within(of, elements.begin, elements.end); };
  const StoredRange first   = part(weight.first);
  if (first.empty()) return;
  const auto applied    = applied_gradients_.find(static_cast<std::size_t>(&weight - here().weights.data()));
  const Access gradient = access(part(applied == applied_gradients_.end() ? weight.gradient : applied->second));
  // Gradients of an earlier step that overflowed have a factor that is not a number.
  const bool skips                 = setup_.plan.precision.scales() && !delays();
  const std::optional<Access> skip = skips ? std::optional<Access>(here().skipped) : std::nullopt;
  const Access factor              = delays() ? applied_factor() : updates_early() ? no_clipping() : here().factor;
  const Labels labels{.stage = index(weight.stage),
                      .layer = setup_.step.model.blocks[weight.block].layer,
                      .phase = std::string(update_phase)};
  double decay = setup_.step.spec(weight).shape.size() >= 2 ? plan.weight_decay : 0;
  if (group > 0) decay = plan.groups[static_cast<std::size_t>(group) - 1].weight_decay.value_or(decay);
  const bool rounds                   = !weight.master.empty();
  const Access value                  = access(within(weight.value, first.begin, first.end));
  const Access updated                = rounds ? access(part(weight.master)) : value;
  const std::optional<Access> rounded = rounds ? std::optional<Access>(value) : std::nullopt;
  const Access rate                   = here().rate.range(8 * group, 8);
  if (plan.kind == OptimizerKind::adamw) {
    adamw(graph(), {.name         = "adamw " + name,
                    .weight       = updated,
                    .gradient     = gradient,
                    .first        = access(first),
                    .second       = access(part(weight.second)),
                    .factor       = factor,
                    .rate         = rate,
                    .step         = here().num_updates,
                    .beta1        = plan.beta1,
                    .beta2        = plan.beta2,
                    .eps          = plan.eps,
                    .weight_decay = decay,
                    .labels       = labels,
                    .value        = rounded,
                    .skip         = skip});
  } else {
    sgd(graph(), {.name         = "sgd " + name,
                  .weight       = updated,
                  .gradient     = gradient,
                  .velocity     = access(first),
                  .factor       = factor,
                  .rate         = rate,
                  .momentum     = plan.momentum,
                  .weight_decay = decay,
                  .labels       = labels,
                  .value        = rounded,
                  .skip         = skip});
  }
}

// With zero1 and grad_op every rank updates its shard of the whole weights, and gathers the other shards.
void StepBuilder::gather_updated(const Unit& unit) {
  if (shards_values()) return;
  const DType type    = setup_.step.type;
  const Buffer values = unit.flat(WeightTensor::value);
  const Member by     = member("gather", LaneKind::gather);
  const Labels labels{.stage = index(unit.spec->stage), .layer = unit.spec->layer, .phase = std::string(update_phase)};
  ShardUnit flat{.name = unit.spec->name, .flat = unit.spec->flat};
  if (flat.flat) {
    gather_unit(graph(), by, flat, type, shards_in_whole(flat, type, values, by.index), values,
                {.name = "updated " + flat.name, .labels = labels});
  }
  for (std::size_t i = 0; i < unit.weights.size(); ++i) {
    const StepWeight& weight = here().weights[unit.weights[i]];
    const WeightSpec& spec   = setup_.step.spec(weight);
    if (unit.spec->weights[i].flat || (weight.tied && has(setup_.stage_of_weight.at(spec.tied_to)))) continue;
    ShardUnit other{.name = spec.name, .weights = {unit.spec->weights[i]}};
    other.weights.front().offset = 0;
    gather_unit(graph(), by, other, type, shards_in_whole(other, type, weight.value.buffer, by.index),
                weight.value.buffer, {.name = "updated", .others = {spec.name}, .labels = labels});
  }
}

}  // namespace stepgraph
