// The end of a training step: gradients over ranks, the norm of all of them, the update.
#include <algorithm>

#include "engine/error.hpp"
#include "graphs/step_builder.hpp"
#include "graphs/weights.hpp"
#include "ops/convert.hpp"
#include "ops/loss_scale.hpp"
#include "ops/optimizer.hpp"
#include "ops/reduce.hpp"

namespace stepgraph {

void StepBuilder::all_reduce_part(const std::string& name, Group group, int members, const Access& bytes, DType type,
                                  LaneKind lane, const Labels& labels) {
  const Region region = bytes.region;
  const auto size =
      static_cast<double>(region.length == Access::whole ? graph().spec(bytes.buffer).size_bytes : region.num_bytes());
  graph().add({.name        = name,
               .lane        = graph().lane(rank_, lane),
               .accumulates = bytes,
               .part        = PartSpec{.group = group, .op = PartOp::all_reduce, .type = type, .message = name},
               .kind        = NodeKind::communicate,
               .op          = "all_reduce",
               .cost        = {.bytes_moved = 2 * size, .bytes_sent = size * (members - 1)},
               .labels      = labels});
}

// Over data-parallel ranks, in the type that the plan chooses for it.
void StepBuilder::reduce_gradient(StepWeight& weight, const Labels& labels) {
  const std::string& of = setup_.step.spec(weight).name;
  const DType type      = setup_.plan.precision.reduce;
  const Group group     = setup_.group(rank_, Axis::dp, "gradients");
  const int members     = setup_.plan.layout.dp;
  if (type == sum_type()) {
    all_reduce_part("all_reduce gradient of " + of, group, members, weight.gradient, type, LaneKind::reduce, labels);
    return;
  }
  const std::int64_t elements =
      graph().spec(weight.gradient).size_bytes / static_cast<std::int64_t>(size_bytes(sum_type()));
  const bool kept = keeps_rounded_gradients() && setup_.options.keep_gradients;
  const Buffer rounded =
      make("rounded gradient of " + of, elements, type, kept ? Lifetime::persistent : Lifetime::step);
  convert(graph(), {.name   = "round gradient of " + of,
                    .lane   = LaneKind::reduce,
                    .to     = rounded,
                    .from   = weight.gradient,
                    .labels = labels});
  all_reduce_part("all_reduce gradient of " + of, group, members, rounded, type, LaneKind::reduce, labels);
  if (keeps_rounded_gradients()) {
    weight.gradient = rounded;
    return;
  }
  convert(graph(), {.name   = "widen gradient of " + of,
                    .lane   = LaneKind::reduce,
                    .to     = weight.gradient,
                    .from   = rounded,
                    .labels = labels});
}

// A stage's gradients are complete: over data-parallel ranks, in the order in which backward finished them. Where
// tensor-parallel neighbours hold the same piece, each has the gradient of its own use: those are added up too.
void StepBuilder::reduce_gradients(Stage stage) {
  auto& weights = here().weights;
  for (auto weight = weights.rbegin(); weight != weights.rend(); ++weight) {
    if (weight->stage != stage) continue;
    const WeightSpec& spec = setup_.step.spec(*weight);
    const Weight entry     = table_.find(spec.name);
    if (!table_[entry].has_gradient) {
      throw Error(ErrorKind::config,
                  str("weight '", spec.name, "' of block '", setup_.step.model.blocks[weight->block].name,
                      "': nothing adds to its gradient (an op of the forward pass that reads it, with "
                      "weight_gradients, and on_backward in every op after it)"));
    }
    const Labels labels{
        .stage = index(stage), .layer = setup_.step.model.blocks[weight->block].layer, .phase = "reduce"};
    if (setup_.plan.layout.dp > 1) reduce_gradient(*weight, labels);
    if (!spec.cut) {
      if (setup_.shares_rows()) {  // each rank has the gradient of its own rows
        all_reduce_part("all_reduce shares of gradient of " + spec.name, setup_.group(rank_, Axis::tp, "shares"),
                        tp_.size, weight->gradient, type_of(weight->gradient), LaneKind::reduce, labels);
      }
      continue;
    }
    for (const WeightPiece& piece : pieces_of(spec, tp_.size, tp_.index)) {
      if (piece.num_holders == 1) continue;
      if (spec.dim != 0) {
        throw Error(ErrorKind::config,
                    str("weight '", spec.name, "': a piece that several ranks hold is cut along dim 0"));
      }
      const std::int64_t row_bytes = graph().spec(weight->gradient).size_bytes / entry.shape[0];
      all_reduce_part("all_reduce shared gradient of " + piece.tensor, setup_.shared_group(piece.num_holders, coord_),
                      piece.num_holders, weight->gradient.range(piece.local * row_bytes, piece.size * row_bytes),
                      type_of(weight->gradient), LaneKind::reduce, labels);
    }
  }
}

// The two gradients of a tied weight, each summed over microbatches and data-parallel ranks by now, are added up: the
// owner's first.
void StepBuilder::join_tied_weights() {
  for (const StepWeight& weight : here().weights) {
    const WeightSpec& spec = setup_.step.spec(weight);
    for (const StepWeight& owner : here().weights) {  // both here
      if (spec.tied_to.empty() || setup_.step.spec(owner).name != spec.tied_to) continue;
      reduce_into(graph(), {.name   = "add gradient of " + spec.name,
                            .lane   = std::nullopt,
                            .into   = owner.gradient,
                            .from   = weight.gradient,
                            .labels = {.phase = "reduce"}});
    }
  }
  for (const Block& block : setup_.step.model.blocks) {
    for (const WeightSpec& spec : block.weights) {
      if (spec.tied_to.empty()) continue;
      const Stage owner_stage = setup_.stage_of_weight.at(spec.tied_to),
                  own_stage   = setup_.stage_of_weight.at(spec.name);
      if (has(owner_stage) == has(own_stage)) continue;  // both here, or neither
      const std::string& mine = has(owner_stage) ? spec.tied_to : spec.name;
      for (const StepWeight& weight : here().weights) {
        if (setup_.step.spec(weight).name != mine) continue;
        all_reduce_part("all_reduce tied gradient of " + spec.tied_to, setup_.tied_group(spec, coord_), 2,
                        weight.gradient, type_of(weight.gradient), LaneKind::reduce, {.phase = "reduce"});
      }
    }
  }
}

// Every element once: of a piece that several tensor-parallel ranks hold, at the first of them.
void StepBuilder::add_norm() {
  squares_            = make("squares", exact_sum_size(sum_type()), DType::i64, Lifetime::step);
  factor_             = make("clip factor", 1, DType::f64, Lifetime::step);
  const Labels labels = {.phase = "norm"};
  graph().add({.name = "clear squares", .writes = squares_, .op = "clear", .labels = {.phase = "clear"}},
              [](const Context& context) {
                for (std::int64_t& limb : context.write<std::int64_t>()) limb = 0;
              });
  for (const StepWeight& weight : here().weights) {
    if (weight.tied) continue;
    const WeightSpec& spec = setup_.step.spec(weight);
    // On the compute lane, after the last backward: earlier, beside it, each would take a thread from a larger kernel.
    const auto add = [&](const std::string& name, const Access& values) {
      square_sum(graph(), {.name = "square_sum " + name, .values = values, .sum = squares_, .labels = labels});
    };
    const auto pieces = pieces_of(spec, tp_.size, tp_.index);
    const bool all    = std::all_of(pieces.begin(), pieces.end(), [](const auto& piece) { return piece.first_holder; });
    if (all) {
      add(spec.name, weight.gradient);
      continue;
    }
    const std::int64_t row_bytes = graph().spec(weight.gradient).size_bytes / local_shape(spec, tp_.size, tp_.index)[0];
    for (const WeightPiece& piece : pieces) {
      if (piece.first_holder) add(piece.tensor, weight.gradient.range(piece.local * row_bytes, piece.size * row_bytes));
    }
  }
  const int members = setup_.plan.layout.tp * setup_.plan.layout.pp;
  if (members > 1) {
    all_reduce_part("all_reduce squares", setup_.group(rank_, {Axis::tp, Axis::pp}, "norm"), members, squares_,
                    DType::i64, LaneKind::reduce, labels);
  }
  ClipFactor clip{.squares = squares_,
                  .type    = sum_type(),
                  .norm    = here().grad_norm,
                  .factor  = factor_,
                  .clip    = setup_.plan.optimizer.clip,
                  .labels  = {.phase = "clip"}};
  const PrecisionPlan& precision = setup_.plan.precision;
  if (precision.scales()) {
    clip.scale    = here().loss_scale;
    clip.overflow = here().skipped;
  }
  clip_factor(graph(), clip);
  if (precision.scales()) {
    update_loss_scale(graph(), {.overflow     = here().skipped,
                                .scale        = here().loss_scale,
                                .good_steps   = here().good_steps,
                                .num_updates  = here().num_updates,
                                .dynamic      = precision.scaling() == Scaling::dynamic,
                                .growth_steps = precision.loss_scale.growth_steps,
                                .labels       = {.phase = "clip"}});
  }
}

void StepBuilder::add_updates() {
  const OptimizerPlan& plan = setup_.plan.optimizer;
  // With scaling, steps that are skipped are not counted.
  const bool scales                = setup_.plan.precision.scales();
  const Buffer step                = scales ? here().num_updates : here().step;
  const std::optional<Access> skip = scales ? std::optional<Access>(here().skipped) : std::nullopt;
  for (const StepWeight& weight : here().weights) {
    if (weight.first == Buffer{}) continue;  // another weight's value
    const WeightSpec& spec = setup_.step.spec(weight);
    const Labels labels{
        .stage = index(weight.stage), .layer = setup_.step.model.blocks[weight.block].layer, .phase = "update"};
    const double decay                  = spec.shape.size() >= 2 ? plan.weight_decay : 0;
    const bool rounds                   = weight.master != Buffer{};
    const Buffer updated                = rounds ? weight.master : weight.value;
    const std::optional<Access> rounded = rounds ? std::optional<Access>(weight.value) : std::nullopt;
    if (plan.kind == OptimizerKind::adamw) {
      adamw(graph(), {.name         = "adamw " + spec.name,
                      .weight       = updated,
                      .gradient     = weight.gradient,
                      .first        = weight.first,
                      .second       = weight.second,
                      .factor       = factor_,
                      .rate         = here().rate,
                      .step         = step,
                      .beta1        = plan.beta1,
                      .beta2        = plan.beta2,
                      .eps          = plan.eps,
                      .weight_decay = decay,
                      .labels       = labels,
                      .value        = rounded,
                      .skip         = skip});
    } else {
      sgd(graph(), {.name         = "sgd " + spec.name,
                    .weight       = updated,
                    .gradient     = weight.gradient,
                    .velocity     = weight.first,
                    .factor       = factor_,
                    .rate         = here().rate,
                    .momentum     = plan.momentum,
                    .weight_decay = decay,
                    .labels       = labels,
                    .value        = rounded,
                    .skip         = skip});
    }
  }
}

}  // namespace stepgraph
