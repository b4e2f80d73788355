#include "graphs/step/setup.hpp"

#include "graphs/models/check_model.hpp"
#include "graphs/schedule/lowering.hpp"
#include "graphs/schedule/validate.hpp"
#include "graphs/step/pipeline.hpp"
#include "graphs/step/resolve.hpp"

namespace stepgraph {

StepSetup::StepSetup(const Model& model, const Plan& resolved, const BatchSpec& batch, bool trains,
                     const StepOptions& asked)
    : step{.graph            = Graph(1),
           .layout           = Layout(resolved.layout),
           .model            = checked_model(model),
           .batch            = batch,
           .type             = resolved.precision.param,
           .precision        = resolved.precision,
           .num_microbatches = microbatches_of(resolved, batch),
           .shard_size       = stepgraph::shard_group(resolved, 0).size},
      plan(resolved),
      options(asked) {
  const int num_ranks = step.layout.num_ranks();
  if (trains) {
    step.schedule = schedule_of(plan.pipeline, plan.layout.pp, step.num_microbatches);
    validate(step.schedule);
    if (plan.shard.keep_between_microbatches) step.schedule = with_unshard(step.schedule);
    step.schedule = with_send_recv(with_reduce_grad(step.schedule));
  } else {
    step.schedule = forward_schedule(plan.pipeline, plan.layout.pp, step.num_microbatches);
  }
  blocks_of_stage = blocks_of_stages(model, step.schedule.num_stages());
  step.graph      = options.only ? Graph(num_ranks, *options.only) : Graph(num_ranks);
  step.ranks.resize(static_cast<std::size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank) {
    step.ranks[static_cast<std::size_t>(rank)].coord = step.layout.coord(Rank{rank});
  }
  for (std::size_t stage = 0; stage < blocks_of_stage.size(); ++stage) {
    for (const std::size_t block : blocks_of_stage[stage]) {
      for (const WeightSpec& weight : step.model.blocks[block].weights) {
        stage_of_weight.emplace(weight.name, Stage{static_cast<int>(stage)});
      }
    }
  }
  make_groups(trains);
}

const StepSetup::Units& StepSetup::units(int tp_index) {
  const auto [found, fresh] = units_.try_emplace(tp_index);
  if (fresh) {
    for (ShardUnit& unit : shard_units(step.model, plan, blocks_of_stage, tp_index))
      found->second.push_back(std::make_shared<const ShardUnit>(std::move(unit)));
  }
  return found->second;
}

Rank StepSetup::rank_of(Stage stage, Coord coord) const {
  coord.pp = index(step.schedule.rank_of_stage[static_cast<std::size_t>(index(stage))]);
  return step.layout.rank(coord);
}

}  // namespace stepgraph
