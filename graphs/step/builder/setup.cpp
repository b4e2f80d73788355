#include "graphs/step/builder/setup.hpp"

#include "engine/base/error.hpp"
#include "graphs/models/check_model.hpp"
#include "graphs/schedule/lowering.hpp"
#include "graphs/schedule/validate.hpp"
#include "graphs/step/builder/resolve.hpp"
#include "graphs/step/pipeline.hpp"

namespace stepgraph {
namespace {

// About the nodes of a block for one microbatch, as counted for GPT-2 and Llama.
double nodes_of_block(const Plan& plan, bool trains) {
  const LayoutSpec& layout = plan.layout;
  double nodes             = trains ? 18 : 6;
  if (layout.tp > 1) nodes += (trains ? 5 : 2) * (layout.sequence_parallel ? 2 : 1);
  if (trains && plan.recompute != Recompute::none) nodes += plan.recompute == Recompute::selective ? 1 : 5;
  if (trains && layout.dp > 1 && plan.shard.reduce == ReduceWhen::each) nodes += 4;
  return nodes;
}

// An estimate. Expanded collectives are counted when they are expanded.
void check_num_nodes(const Model& model, const Plan& plan, int microbatches, bool trains,
                     const std::optional<RankSet>& only) {
  constexpr int most_ranks = 1 << 20;
  const LayoutSpec& layout = plan.layout;
  const double ranks       = static_cast<double>(layout.dp) * layout.tp * layout.pp;
  const auto blocks        = static_cast<double>(model.blocks.size());
  constexpr double of_rank = 20;  // nodes of a rank beside those of blocks
  double nodes = nodes_of_block(plan, trains) * blocks * microbatches * layout.dp * layout.tp + of_rank * ranks;
  if (only) nodes *= static_cast<double>(only->size()) / ranks;
  if (nodes <= max_step_nodes && ranks <= most_ranks) return;
  throw Error(ErrorKind::config,
              str("step: about ", static_cast<std::int64_t>(nodes), " nodes: ", model.blocks.size(), " blocks x ",
                  microbatches, " microbatches x ", layout.dp, " data-parallel x ", layout.tp,
                  " tensor-parallel ranks, ", static_cast<std::int64_t>(ranks), " ranks in all (at most ",
                  max_step_nodes, " nodes; a larger batch.micro, a smaller batch.global or fewer ranks)"));
}

}  // namespace

StepRanks::StepRanks(const Layout& layout, RankSet ranks) : ranks_(std::move(ranks)), entries_(ranks_.size()) {
  for (std::size_t place = 0; place < entries_.size(); ++place) entries_[place].coord = layout.coord(ranks_[place]);
}

const StepRank* StepRanks::find(Rank rank) const noexcept {
  const std::optional<std::size_t> place = ranks_.place(rank);
  return place ? &entries_[*place] : nullptr;
}

const StepRank& StepRanks::at(Rank rank) const {
  if (const StepRank* const found = find(rank)) return *found;
  throw Error(ErrorKind::config,
              str("step: does not hold rank ", rank, " (", ranks_.size(), " ranks, the first is ", ranks_[0], ")"));
}
StepRank& StepRanks::at(Rank rank) { return const_cast<StepRank&>(std::as_const(*this).at(rank)); }

StepSetup::StepSetup(const Model& model, const Plan& resolved, const BatchSpec& batch, bool trains,
                     const StepOptions& asked)
    : step{.graph            = Graph(1),
           .layout           = Layout(resolved.layout),
           .model            = checked_model(model),
           .batch            = batch,
           .type             = resolved.precision.param,
           .precision        = resolved.precision,
           .optimizer        = resolved.optimizer.kind,
           .num_microbatches = microbatches_of(resolved, batch),
           .shard_size       = stepgraph::shard_group(resolved, 0).size,
           .update_first     = trains && asked.update_first,
           .update           = trains ? resolved.update : UpdatePlan{}},
      plan(resolved),
      options(asked) {
  check_num_nodes(model, plan, step.num_microbatches, trains, options.only);
  const int num_ranks = step.layout.num_ranks();
  if (trains) {
    step.schedule = schedule_of(plan.pipeline, plan.layout.pp, step.num_microbatches);
    validate(step.schedule);
    if (plan.shard.keep_between_microbatches) step.schedule = with_unshard(step.schedule);
    step.schedule = with_send_recv(with_reduce_grad(step.schedule));
  } else {
    step.schedule = forward_schedule(plan.pipeline, plan.layout.pp, step.num_microbatches);
  }
  blocks_of_stage = blocks_of_stages(model, step.schedule.num_stages(), plan.pipeline.split);
  step.graph      = Graph(num_ranks, options.only.value_or(RankSet::all(num_ranks)));
  step.ranks      = StepRanks(step.layout, step.graph.ranks());
  for (std::size_t stage = 0; stage < blocks_of_stage.size(); ++stage) {
    step.layers.push_back(0);
    for (const std::size_t block : blocks_of_stage[stage]) {
      step.layers.back() += step.model.blocks[block].layer >= 0;
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

const WeightSpec& StepSetup::weight_named(const std::string& name) const {
  for (const Block& block : step.model.blocks) {
    for (const WeightSpec& weight : block.weights) {
      if (weight.name == name) return weight;
    }
  }
  throw Error(ErrorKind::config, str("model: has no weight '", name, "'"));
}

Rank StepSetup::rank_of(Stage stage, Coord coord) const {
  coord.pp = index(step.schedule.rank_of_stage[static_cast<std::size_t>(index(stage))]);
  return step.layout.rank(coord);
}

}  // namespace stepgraph
