#include "graphs/step/memory/likeness.hpp"

#include "graphs/models/weights.hpp"

namespace stepgraph {

RankKinds::RankKinds(const Model& model, const Plan& resolved, const BatchSpec& batch, bool trains)
    : setup_(model, resolved, batch, trains, {.only = Rank{0}}) {}

Likeness RankKinds::of(Rank rank) {
  const Coord coord          = setup_.step.layout.coord(rank);
  const auto [found, is_new] = units_.try_emplace(coord.tp);
  if (is_new) found->second = shard_units(setup_.step.model, setup_.plan, setup_.blocks_of_stage, coord.tp);
  Likeness out{.pp = coord.pp, .weights = {}, .kept = {}};
  for (std::size_t stage = 0; stage < setup_.blocks_of_stage.size(); ++stage) {
    if (setup_.rank_of(Stage{static_cast<int>(stage)}, coord) != rank) continue;
    for (const std::size_t block : setup_.blocks_of_stage[stage]) {
      for (const WeightSpec& weight : setup_.step.model.blocks[block].weights)
        out.weights.push_back(local_shape(weight, setup_.plan.layout.tp, coord.tp));
    }
  }
  // Ranks of an asynchronous window own different weights.
  if (setup_.plan.update.mode == UpdateWhen::asynchronous) out.kept.push_back(coord.dp);
  const int member = shard_group(setup_.plan, coord.dp).member;
  for (const ShardUnit& unit : found->second) {
    if (setup_.rank_of(unit.stage, coord) != rank) continue;
    for (const ShardedWeight& weight : unit.weights) {
      if (!weight.flat) out.kept.push_back(weight.range(member).size());
    }
  }
  return out;
}

Rank RankKinds::first_like(Rank rank) {
  const Layout& layout  = setup_.step.layout;
  Coord coord           = layout.coord(rank);
  coord.dp              = 0;
  const Likeness wanted = of(layout.rank(coord));
  for (Coord other = coord; other.tp > 0;) {
    --other.tp;
    if (of(layout.rank(other)) == wanted) coord = other;
  }
  return layout.rank(coord);
}

}  // namespace stepgraph
